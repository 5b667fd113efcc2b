#!/bin/bash
# An environment layered over another one, whose packages it sees: layered_environment.sh BASE_PYTHON FOLDER
set -euo pipefail
base=$1 folder=$2
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
test -x "$folder/bin/python" || "$base" -m venv "$folder"
# As a site and not as a path: what the base has by files of its own (.pth), such as this project itself, is found, too.
echo "import site; site.addsitedir('$(site "$base")')" >"$(site "$folder/bin/python")/base.pth"
