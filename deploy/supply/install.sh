#!/bin/sh
# install.sh PYTHON LOCK: puts the packages of a lock file into that interpreter's environment, each by its hash and none by
# what an index says it needs. uv does it where it is there and finds them (it reads no pip.conf); pip does it otherwise.
set -eu
if command -v uv >/dev/null; then
  uv pip install --quiet --python "$1" --compile-bytecode --require-hashes --no-deps --requirement "$2" && exit
  echo "uv could not install $2 (above): pip tries" >&2
fi
exec "$1" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement "$2"
