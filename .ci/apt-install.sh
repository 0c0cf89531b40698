#!/bin/sh
# Debian packages for the tests, as programs only: no service of theirs is started. Needs root and apt-get.
set -e
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod 755 $policy
  trap 'rm -f $policy' EXIT
fi
apt-get -qq -o DPkg::Lock::Timeout=300 update
DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >/dev/null
