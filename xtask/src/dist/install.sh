#!/bin/sh
# Installs Decapod from the folder that this script is in. It needs no network.
#
#   ./install.sh                                       a server with a node
#   ./install.sh server -- --tls-san api.example       with flags of `decapod server`
#   ./install.sh agent --server https://SERVER:6443 --token-file FILE
#
# Arguments are those of `decapod install`. Variables: DECAPOD_URL and DECAPOD_TOKEN (server and token to join),
# INSTALL_DECAPOD_EXEC (arguments, in front of the script's), INSTALL_DECAPOD_SKIP_START=true.
#
# Archives of images in `images/` beside this script are copied to the data directory, and imported at the start;
# manifests in `manifests/` are applied. DECAPOD_DATA_DIR names another data directory than /var/lib/decapod.
set -eu

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

here=$(cd "$(dirname "$0")" && pwd)
program="$here/decapod"
data="${DECAPOD_DATA_DIR:-/var/lib/decapod}"

[ "$(uname -s)" = Linux ] || fail "Decapod runs on Linux only"
[ -f "$program" ] || fail "there is no program $program: unpack the whole archive"
[ "$(id -u)" = 0 ] || fail "installing needs root: run it with sudo"
"$program" version >/dev/null 2>&1 ||
    fail "$program does not run on this machine ($(uname -m)): take the archive of its architecture"

copy() {
    [ -d "$here/$1" ] || return 0
    mkdir -p -m 0700 "$data"
    mkdir -p "$data/$1"
    cp -R "$here/$1/." "$data/$1/"
    echo "copied $1 to $data/$1"
}
copy images
copy manifests

skip=
[ "${INSTALL_DECAPOD_SKIP_START:-false}" != true ] || skip=--no-start
# Words of the variables are arguments of their own.
# shellcheck disable=SC2086
exec "$program" install $skip ${INSTALL_DECAPOD_EXEC:-} "$@"
