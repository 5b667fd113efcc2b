#!/usr/bin/env bash
# The browser tests drive the system's Chromium. Install it where we may (Debian, as root); elsewhere they skip and say so.
set -eu
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing Chromium for the browser tests"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
  echo "no Chromium here: the browser tests will be skipped; install the package chromium to run them"
fi
