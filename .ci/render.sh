#!/usr/bin/env bash
# Draws the dashboards after the tests. A picture with faults fails; where node, npm, Chromium or the npm registry cannot be had, or
# time runs out, nothing was drawn and that is said loudly. At most six minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
INSTALL_S=150 ALL_S=360

not_rendered() {
  echo "DASHBOARDS NOT RENDERED: $1" >&2
  exit 0
}

command -v npm >/dev/null || sh .ci/apt-install.sh nodejs npm || not_rendered "node and npm are not installed and could not be"
node -e 'const [major, minor] = process.versions.node.split("."); process.exit(major > 20 || (major == 20 && minor >= 19) ? 0 : 1)' ||
  not_rendered "node $(node --version) is too old: 20.19 or newer is needed"
command -v chromium >/dev/null || sh .ci/apt-install.sh chromium || not_rendered "Chromium is not installed and could not be"

log=$(mktemp)
timeout "$INSTALL_S" make --silent render-packages >"$log" 2>&1
code=$?
cat "$log"
[ $code -ne 124 ] || not_rendered "npm packages were not there within $INSTALL_S s"
if [ $code -ne 0 ]; then
  # What npm says where it was not answered; a lock file that does not fit, or a package with another digest, is a fault.
  ! grep -Eq 'ENOTFOUND|EAI_AGAIN|ECONN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|SOCKET_TIMEOUT|ENOTCACHED|error code E[45][0-9][0-9]' "$log" ||
    not_rendered "the npm registry did not answer"
  exit 1
fi
timeout $((ALL_S - SECONDS)) make --silent render
code=$?
[ $code -ne 124 ] || not_rendered "not drawn within $ALL_S s"
exit $code
