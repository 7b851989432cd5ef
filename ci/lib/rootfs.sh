# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
#
# The root file system: Debian stable with the kernel and QEMU of its backports. Everything is built inside it, the
# model and QEMU run inside it, and it is the guest's root too, so that nothing depends on the host's versions.

export IBGDA_SUITE=trixie

# Makes sure that there is a root file system; ROOTFS is its path.
rootfs_ensure() {
    local recipe=$IBGDA_SRC/ci/rootfs key
    key=$(hash_of "$recipe"/* "$IBGDA_SRC/ci/lib/rootfs.sh" </dev/null)
    part rootfs "$key" "root file system" rootfs_fill
    ROOTFS=$PART
}

rootfs_fill() {
    local new=$1 recipe=$IBGDA_SRC/ci/rootfs mirrors=() option=() path quoted
    # Hooks are shell code.
    quoted=$(printf '%q' "$recipe")
    mapfile -t mirrors < <(debian_mirrors)
    apt-config dump 2>/dev/null | grep -E '^Acquire::https?::[^"]*(Proxy|CaInfo|Verify)' | grep -vi detect >"$new.apt" || true
    # Documentation and translations are a third of the files.
    for path in /usr/share/{doc,man,info,locale,gtk-doc}; do
        option+=("--dpkgopt=path-exclude=$path/*")
    done
    # rdma-core's own tests lie there. The pattern must cover their parent directory too, or dpkg does not make it.
    option+=("--dpkgopt=path-include=/usr/share/doc/rdma-core/*")
    # This machine may not be a Debian, and then does not trust Debian's keys; its mirror may have a key of its own.
    option+=(--keyring=/usr/share/keyrings/debian-archive-keyring.gpg)
    [[ ! -d /etc/apt/trusted.gpg.d ]] || option+=(--keyring=/etc/apt/trusted.gpg.d)
    mmdebstrap --mode=root --variant=apt --format=directory \
        --aptopt="$new.apt" --aptopt='Acquire::Retries "3"' --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt=force-unsafe-io "${option[@]}" \
        --include="$(grep -v '^#' "$recipe/packages" | xargs | tr ' ' ,)" \
        --setup-hook="$quoted/setup \"\$1\"" \
        --customize-hook="cp $quoted/packages-backports $quoted/customize \"\$1\"/" \
        --customize-hook='chroot "$1" /customize' \
        "$IBGDA_SUITE" "$new" "${mirrors[@]}"
    rm -f -- "$new.apt"
}

# Prints the source lines for Debian's mirror that this machine's own apt uses. Prints nothing where that is no Debian
# or names no mirror that works from inside the new root: then mmdebstrap's default is used.
debian_mirrors() {
    local id='' codename='' uri release component main='' security=''
    # shellcheck disable=SC1091
    . /etc/os-release
    id=${ID:-}
    codename=${VERSION_CODENAME:-}
    [[ $id == debian && -n $codename ]] || return 0
    while read -r uri release component; do
        [[ $uri == http?(s)://* && $component == main ]] || continue
        case $release in
        "$codename" | stable | testing) main=${main:-$uri} ;;
        "$codename-security" | stable-security | testing-security) security=${security:-$uri} ;;
        esac
    done < <(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null)
    [[ -n $main ]] || return 0
    printf 'deb %s %s main\n' "$main" "$IBGDA_SUITE"
    [[ -z $security ]] || printf 'deb %s %s-security main\n' "$security" "$IBGDA_SUITE"
}
