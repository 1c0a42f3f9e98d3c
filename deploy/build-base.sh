#!/usr/bin/env bash
# Makes a base image out of Debian's packages, for machines that reach no image registry:
#
#   deploy/build-base.sh [NAME [PACKAGES]]   (as root; default: batonmq-base:bookworm, with Python)
#   deploy/build-base.sh batonmq-prometheus:bookworm prometheus   (for `--profile observe`)
#
# The mirror and its keys are those that apt uses on this machine; MIRROR=address overrides it.
set -euo pipefail
name=${1:-batonmq-base:bookworm}
packages=${2:-python3,python3-venv,ca-certificates}
suite=${SUITE:-bookworm}

for tool in debootstrap docker; do
  command -v "$tool" >/dev/null || { echo "build-base: $tool is missing (apt-get install debootstrap docker.io)" >&2; exit 1; }
done
mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $suite" | head -n 1)}
[ -n "$mirror" ] || { echo "build-base: apt has no source of $suite; give MIRROR=address" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "build-base: $suite by debootstrap, about a minute"
debootstrap --variant=minbase --include="$packages" \
  "$suite" "$work/root" "$mirror" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
rm -rf "$work/root"/var/cache/apt/* "$work/root"/var/lib/apt/lists/* "$work/root"/usr/share/{doc,man,locale}/*
tar -C "$work/root" --numeric-owner --one-file-system -c . | docker import - "$name" >/dev/null
echo "build-base: $name is there"
