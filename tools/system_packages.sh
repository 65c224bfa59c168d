#!/bin/sh
# Debian packages that some tests need: SPIN and a C compiler for tests/model, iproute2 for cutting networks in tests/chaos,
# Prometheus for tests/scaling.
# Installs what is missing where it may (root on Debian or a like system), else says what to do. Without them those tests skip.
set -eu
PACKAGES="spin gcc libc6-dev iproute2 prometheus"
COMMANDS="spin gcc ip promtool"

installed() {
  dpkg-query --show --showformat='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'
}

missing=""
if command -v apt-get >/dev/null 2>&1; then
  for package in $PACKAGES; do
    installed "$package" || missing="$missing $package"
  done
else
  for command in $COMMANDS; do
    command -v "$command" >/dev/null 2>&1 || missing="$missing $command"
  done
fi
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  echo "system packages: not here:$missing; the tests that need them skip" >&2
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "system packages: not here:$missing; the tests that need them skip. To have them: sudo apt-get install$missing" >&2
  exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "==> installing$missing (apt-get)"
apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1
}
# shellcheck disable=SC2086
if apt_get update && apt_get install --yes --no-install-recommends $missing; then
  exit 0
fi
echo "system packages: apt-get could not install$missing; the tests that need them skip. It said:" >&2
grep -E '^(E|W):' "$log" | tail -5 >&2 || tail -5 "$log" >&2
