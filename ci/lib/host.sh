# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# What the host must have. Only this file installs anything outside the cache.

# command:package
readonly HOST_NEEDS=(
    mmdebstrap:mmdebstrap
    unshare:util-linux
    setpriv:util-linux
    flock:util-linux
    mount:mount
    chroot:coreutils
    find:findutils
    gpgv:gpgv
)

require_host() {
    local need missing=()
    ((EUID == 0)) || die "must run as root: it makes a root file system, mounts, and boots a VM from it"
    [[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m); the model and its VM are for x86_64"
    for need in "${HOST_NEEDS[@]}"; do
        command -v "${need%%:*}" >/dev/null || missing+=("${need#*:}")
    done
    [[ -s /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
    [[ -s /etc/ssl/certs/ca-certificates.crt ]] || missing+=(ca-certificates)
    ((${#missing[@]} == 0)) || install_on_host "${missing[@]}"
}

install_on_host() {
    command -v apt-get >/dev/null ||
        die "needs the packages $* (by Debian's names), and this machine has no apt-get to install them with"
    step "installing on this machine: $*" apt_install "$@"
}

apt_install() {
    # A source that cannot be reached must not stop us when the others have what is needed.
    apt-get -q update || say "apt-get update had errors; going on with what it got"
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@"
}
