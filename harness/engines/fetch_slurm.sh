#!/usr/bin/env bash
# SLURM's programs for the test cluster, unpacked from Debian's packages: fetch_slurm.sh FOLDER [--with-ssh]
# (with sshd). Nothing is installed. What this machine lacks of the packages' libraries comes along. A folder that is
# complete is left as it is.
set -euo pipefail
target="$(mkdir -p "$1" && cd "$1" && pwd)"
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge)
ready="$target/.ready"
if [ "${2:-}" = --with-ssh ]; then
  packages=(openssh-server)
  ready="$target/.ready-ssh"
fi
test ! -e "$ready" || exit 0

for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || { echo "$tool not found: the test cluster's SLURM comes from Debian's packages" >&2; exit 1; }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"

# As root, apt would hand the download to a user who cannot write here.
apt=(apt-get -o APT::Sandbox::User=root -qq)
apt-get --simulate --no-install-recommends install "${packages[@]}" > plan || {
  echo "apt knows no ${packages[*]}: run apt-get update, on Debian 12 or newer" >&2; exit 1; }
mapfile -t missing < <(awk '$1 == "Inst" {print $2}' plan | sort -u)
for package in "${packages[@]}"; do  # those that are installed have their files elsewhere
  [[ " ${missing[*]} " == *" $package "* ]] || missing+=("$package")
done
"${apt[@]}" download "${missing[@]}"
for package in *.deb; do dpkg-deb -x "$package" "$target"; done
touch "$ready"
