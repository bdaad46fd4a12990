#!/bin/sh
# Installs decod for this user, in a folder of its own, and nothing else on the system:
#
#   curl -LsSf https://URL-OF-THIS-FILE | sh
#   sh install.sh --uninstall
#
# It says what it will do, and asks first if somebody can answer. Options, and what they default to:
#
#   --yes               do not ask
#   --from SOURCE       what to install: a name on PyPI, a wheel, or a folder (decod-train)
#   --torch KIND        auto, cpu, cuda, rocm, or pypi for what the package index has (auto)
#   --python VERSION    the Python to use, which uv brings if it is missing (3.11 or newer)
#   --dir FOLDER        where everything goes (~/.local/share/decod-install)
#   --bin FOLDER        where the command goes, a link (~/.local/bin)
#   --uninstall         remove what an earlier call has installed, and nothing else
#
# It needs uv, or Python 3.11 with its module venv, or curl or wget to bring uv. Settings of uv and pip, such as
# UV_INDEX_URL, hold. Nodes keep their identity in a state folder, which stays.

set -eu

say() { printf '%s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }

# --- options ------------------------------------------------------------------------------------

yes=no
from=decod-train
torch=auto
python=">=3.11"
dir="${XDG_DATA_HOME:-$HOME/.local/share}/decod-install"
bin="$HOME/.local/bin"
uninstall=no

while [ $# -gt 0 ]; do
    case "$1" in
    --yes | -y) yes=yes ;;
    --uninstall) uninstall=yes ;;
    --from | --torch | --python | --dir | --bin)
        [ $# -ge 2 ] || fail "$1 needs a value"
        case "$1" in
        --from) from=$2 ;;
        --torch) torch=$2 ;;
        --python) python=$2 ;;
        --dir) dir=$2 ;;
        --bin) bin=$2 ;;
        esac
        shift
        ;;
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *) fail "there is no option $1; try --help" ;;
    esac
    shift
done

case "$torch" in auto | cpu | cuda | rocm | pypi) ;; *) fail "--torch is auto, cpu, cuda, rocm or pypi" ;; esac
case "$dir" in /*) ;; *) dir="$PWD/$dir" ;; esac
case "$from" in ./* | ../*) from="$PWD/$from" ;; esac
mark="$dir/.installed-by-decod"

# --- removal ------------------------------------------------------------------------------------

if [ "$uninstall" = yes ]; then
    [ -f "$mark" ] || fail "nothing of this script is in $dir (--dir names another folder)"
    if [ "$(readlink "$bin/decod" 2>/dev/null || true)" = "$dir/venv/bin/decod" ]; then
        rm -f "$bin/decod"
    fi
    made=$(cat "$mark")
    rm -rf "$dir" "${XDG_CACHE_HOME:-$HOME/.cache}/decod"
    # What this script had to make, and is empty again.
    printf '%s\n' "$made" | while read -r each; do [ -z "$each" ] || rmdir "$each" 2>/dev/null || true; done
    say "Removed $dir, the command, and decod's cache. Nodes' state folders are where they were: \`decod\` names them"
    say "with --state-dir, usually ~/.local/state/decod. A service goes with \`decod service uninstall\`,"
    say "before this script removes the command."
    exit 0
fi

# --- what is here -------------------------------------------------------------------------------

case "$(uname -s)" in
Linux | Darwin) ;;
*) fail "decod runs on Linux and macOS. On Windows, use WSL2: docs/wsl.md" ;;
esac

found="no GPU"
kind=cpu
if has nvidia-smi && nvidia-smi -L >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then
    found="a driver of NVIDIA"
    kind=cuda
elif [ -e /dev/kfd ]; then
    found="AMD's driver"
    kind=rocm
elif [ "$(uname -s)" = Darwin ]; then
    found="a Mac"
    kind=pypi # Its builds have Metal.
fi
[ "$torch" = auto ] || kind=$torch

# uv names a build of torch by its backend. With `auto` it looks at the driver's version.
case "$kind" in
pypi) backend="" ;;
cpu) backend=cpu ;;
*) backend=auto ;;
esac

old_python() { # A Python that can make an environment, from which uv can be had.
    for each in python3.14 python3.13 python3.12 python3.11 python3; do
        if "$each" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            printf '%s' "$each"
            return 0
        fi
    done
    return 1
}

uv="$dir/uv/bin/uv"
if has uv; then
    uv=$(command -v uv)
    way="with $uv"
elif old=$(old_python); then
    way="with uv, which $old takes from the package index"
elif has curl || has wget; then
    way="with uv, which its own installer brings (https://astral.sh/uv)"
else
    fail "there is no uv, no Python with the module venv, and neither curl nor wget to bring them. On Debian and Ubuntu:
  apt install python3-venv"
fi

say "This installs $from for $(id -un), $way."
say "  into        $dir (an environment with a Python and torch of its own; about 1 GB, with CUDA 5 GB)"
say "  command     $bin/decod (a link)"
say "  torch for   $kind: $found was found here (--torch chooses another)"
say "Nothing else is changed. \`sh install.sh --uninstall\` removes all of it."
if [ "$yes" = no ] && [ -r /dev/tty ] && (: </dev/tty) 2>/dev/null; then
    printf 'Go on? [Y/n] '
    read -r answer </dev/tty || answer=n
    case "$answer" in "" | y | Y | yes) ;; *) fail "nothing was changed" ;; esac
fi

# --- installation -------------------------------------------------------------------------------

if [ -e "$dir" ] && [ ! -f "$mark" ]; then
    fail "$dir exists, and this script has not made it: name another --dir"
fi
made=""
for each in "$bin" "$(dirname "$bin")" "$(dirname "$dir")" "$(dirname "$(dirname "$dir")")" "${XDG_CACHE_HOME:-$HOME/.cache}"; do
    [ -d "$each" ] || made="$made$each
"
done
mkdir -p "$dir" "$bin"
[ -f "$mark" ] || printf '%s' "$made" >"$mark"

if ! has uv && [ ! -x "$uv" ]; then
    if old=$(old_python); then
        "$old" -m venv --clear "$dir/uv"
        "$dir/uv/bin/python" -m pip install -q --disable-pip-version-check uv
    else
        installer="$dir/uv-install.sh"
        url="${DECOD_UV_INSTALLER:-https://astral.sh/uv/install.sh}"
        if has curl; then curl -LsSf "$url" -o "$installer"; else wget -q "$url" -O "$installer"; fi
        # The installer changes no profile in this mode.
        UV_UNMANAGED_INSTALL="$dir/uv/bin" sh "$installer" >/dev/null
        rm -f "$installer"
    fi
fi

# What uv brings stays in the folder, too.
UV_PYTHON_INSTALL_DIR="$dir/python"
UV_CACHE_DIR="$dir/cache"
export UV_PYTHON_INSTALL_DIR UV_CACHE_DIR

"$uv" venv -q --clear --python "$python" "$dir/venv"
# A local torch of pip's settings counts for uv, too.
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"
if [ -n "$backend" ]; then
    "$uv" pip install -q --python "$dir/venv/bin/python" --torch-backend "$backend" "$from"
else
    "$uv" pip install -q --python "$dir/venv/bin/python" "$from"
fi
rm -rf "$dir/cache"
ln -sf "$dir/venv/bin/decod" "$bin/decod"

version=$("$dir/venv/bin/decod" --version)
say ""
say "Installed: $version."
case ":$PATH:" in
*":$bin:"*) command=decod ;;
*)
    command="$bin/decod"
    say "$bin is not on your PATH. Add it, or give the command with its folder, as below."
    ;;
esac
say "Look at this machine with:  $command doctor"
say "Try it on this machine:     $command demo"
say "Join a run:                 $command join JOINSTRING"
