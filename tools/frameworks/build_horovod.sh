#!/bin/bash
# Build Horovod 0.28.1 for the torch of a Python environment, and install it there: build_horovod.sh [PYTHON]
#
# Its last release (June 2023) does not build as it is:
# - its CMake files ask for C++14 where today's torch needs C++17; they put the option last but one, so a compiler that
#   appends its own wins;
# - it takes a torch that was built with CUDA, and any nvcc, for a machine with the whole toolkit. This builds for CPUs,
#   where sums go over gloo, unless HOROVOD_GPU_OPERATIONS=NCCL is set.
# Needed: g++, cmake 3.13 or newer, and the network, or the source in HOROVOD_SOURCE (horovod-0.28.1.tar.gz).
# The wheel is kept in TEST_CACHE (~/.cache/dtrain-tests) per Python and torch: the next environment takes it.
set -euo pipefail
VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0  # of its source on PyPI
PYTHON=${1:-python3}
for program in g++ cmake; do
  command -v "$program" >/dev/null || { echo "build_horovod.sh: $program is missing (Debian: apt-get install g++ cmake)" >&2; exit 2; }
done
what=$("$PYTHON" -c 'import sys, torch; print(f"py{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}")') || {
  echo "build_horovod.sh: $PYTHON has no torch, for which Horovod would be built" >&2; exit 2; }
gpu=${HOROVOD_GPU_OPERATIONS:-cpu}
cache=${TEST_CACHE:-$HOME/.cache/dtrain-tests}/horovod-$VERSION-$what-$gpu
if ! compgen -G "$cache/*.whl" >/dev/null; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  if test -n "${HOROVOD_SOURCE:-}"; then cp "$HOROVOD_SOURCE" "$work/"; else
    # By its hash: pip runs a source package's setup.py to learn its name, so it is checked before that.
    echo "horovod==$VERSION --hash=sha256:$SHA256" >"$work/requirements.txt"
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
      --require-hashes --dest "$work" --requirement "$work/requirements.txt"
  fi
  echo "$SHA256  $(echo "$work"/horovod-*.tar.gz)" | sha256sum --check --quiet
  tar -xzf "$work"/horovod-*.tar.gz -C "$work"
  mkdir "$work/bin"
  printf '#!/bin/sh\nexec %s "$@" -std=gnu++17\n' "$(command -v g++)" >"$work/bin/g++"
  chmod +x "$work/bin/g++"
  own=(HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1)
  if test "$gpu" = cpu; then
    find="$work/horovod-$VERSION/cmake/Modules/FindPytorch.cmake"
    sed -i 's/print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)/print(False)/' "$find"
    grep -q 'import CUDA_HOME; print(False)' "$find"
  fi
  echo "building Horovod $VERSION for $what ($gpu); it takes about six minutes on two cores"
  env "${own[@]}" CXX="$work/bin/g++" PATH="$work/bin:$PATH" MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" \
    "$PYTHON" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$work/wheel" \
    "$work/horovod-$VERSION" >"$work/log" 2>&1 || { tail -40 "$work/log" >&2; exit 1; }
  mkdir -p "$cache"
  cp "$work"/wheel/*.whl "$cache/"
fi
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$cache"/horovod-*.whl
"$PYTHON" -m pip install --quiet --disable-pip-version-check cloudpickle psutil pyyaml packaging
"$PYTHON" -c 'import horovod.torch as hvd; print("Horovod", __import__("horovod").__version__, "gloo" if hvd.gloo_built() else "")'
