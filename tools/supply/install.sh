#!/bin/sh
# install.sh PYTHON LOCK: install the packages of a lock file into that interpreter's environment, each by its hash and
# without asking an index for their requirements. uv does it if it is installed and finds the packages (it reads no
# pip.conf); otherwise pip does it.
set -eu
if command -v uv >/dev/null; then
  uv pip install --quiet --python "$1" --compile-bytecode --require-hashes --no-deps --requirement "$2" && exit
  echo "uv could not install $2 (above): pip tries" >&2
fi
exec "$1" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement "$2"
