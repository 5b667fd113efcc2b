#!/bin/bash
# An environment with the frameworks of the extra `frameworks`, and Horovod, layered over another one, whose packages it
# sees: make_environment.sh BASE_PYTHON FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
base=$1 folder=$2
"$here/tools/layered_environment.sh" "$base" "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet wheel setuptools
readarray -t wanted < <("$base" -c '
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["frameworks"], sep="\n")
' "$here/pyproject.toml")
# DeepSpeed is a source package: it is not to compile anything now, and looks at the torch that is there.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" install --quiet --no-build-isolation "${wanted[@]}"
"$here/tools/frameworks/build_horovod.sh" "$folder/bin/python"
