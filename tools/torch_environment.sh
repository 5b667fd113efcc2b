#!/bin/bash
# An environment with another version of torch, layered over another one, whose other packages it sees:
# torch_environment.sh BASE_PYTHON FOLDER VERSION
set -euo pipefail
base=$1 folder=$2 version=$3
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
test -x "$folder/bin/python" || "$base" -m venv "$folder"
# As a site and not as a path: what the base has by files of its own (.pth), such as this project itself, is found, too.
echo "import site; site.addsitedir('$(site "$base")')" >"$(site "$folder/bin/python")/base.pth"
"$folder/bin/python" -c "import importlib.metadata as m; raise SystemExit(m.version('torch').partition('+')[0] != '$version')" ||
  "$folder/bin/python" -m pip --disable-pip-version-check install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "torch==$version"
