#!/usr/bin/env bash
# Kubernetes' own programs for the test cluster, built from Debian 12's source package into FOLDER, without a network
# but for Debian's archive: kubernetes_build.sh FOLDER. About 25 minutes on two cores. Nothing is installed: compiler and
# sources are unpacked into a scratch folder, which is removed. Static programs without changes, but for one vendored
# module, whose version there does not run with this compiler.
set -euo pipefail
target="$(mkdir -p "$1" && cd "$1" && pwd)"
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl)
source_version=1.20.5+really1.20.2
work="$(mktemp -d)"
trap 'chmod -R u+w "$work" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work"

for tool in apt-get dpkg-deb dpkg-source make; do
  command -v "$tool" >/dev/null || { echo "$tool not found: Kubernetes is built on Debian only (packages dpkg-dev, make)" >&2; exit 1; }
done

# The archive's own address, whatever mirror it is; deb-src lines are often missing, so the source comes by a list of ours.
mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)"
test -n "$mirror" || { echo "apt knows no archive of Debian 12 (bookworm), whose source package is built" >&2; exit 1; }
mkdir -p lists
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" > sources.list
apt=(apt-get -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists"
     -o APT::Sandbox::User=root)
"${apt[@]}" update -qq
"${apt[@]}" source --download-only -qq "kubernetes=$source_version-*" 2>/dev/null || "${apt[@]}" source --download-only -qq kubernetes
dpkg-source --no-check -x kubernetes_*.dsc source >/dev/null

apt-get -o APT::Sandbox::User=root download golang-1.19-go golang-1.19-src rsync golang-github-modern-go-reflect2-dev
for package in *.deb; do dpkg-deb -x "$package" tools; done
# golang-1.19-go finds its library by links to absolute paths.
go_root="$work/tools/usr/lib/go-1.19"
rm -rf "$go_root/src" "$go_root/test" "$go_root/misc" "$go_root/api"
ln -s "$work/tools/usr/share/go-1.19/src" "$go_root/src"
mkdir -p "$go_root/misc"

project="$work/go/src/k8s.io/kubernetes"
mkdir -p "$(dirname "$project")"
mv source "$project"
vendored="$project/vendor/github.com/modern-go/reflect2"
rm -rf "$vendored"
cp -r tools/usr/share/gocode/src/github.com/modern-go/reflect2 "$vendored"

printf '%s\n' "KUBE_GIT_COMMIT='0'" "KUBE_GIT_TREE_STATE='clean'" "KUBE_GIT_VERSION='v1.20.2'" "KUBE_GIT_MAJOR='1'" \
  "KUBE_GIT_MINOR='20'" > version
export KUBE_GIT_VERSION_FILE="$work/version" GOROOT="$go_root" GOPATH="$work/go" GOCACHE="$work/cache" HOME="$work"
export GO111MODULE=off GOPROXY=off CGO_ENABLED=0 PATH="$go_root/bin:$work/tools/usr/bin:$PATH"
cd "$project"
nice -n 19 make generated_files
for program in "${programs[@]}"; do
  echo "building $program"
  nice -n 19 make "WHAT=cmd/$program" GOFLAGS=-p=2 GOLDFLAGS='-s -w'
done
install -m 755 $(printf "_output/local/go/bin/%s " "${programs[@]}") "$target"
