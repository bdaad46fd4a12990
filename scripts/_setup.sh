# shellcheck shell=bash
# Sourced by scripts/test and scripts/demo. Makes .venv, and updates it when the dependencies change.
# Reports its work on stderr. If .venv is up to date, it prints nothing.

decod_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Prints the first Python on which decod can run. 3.11 comes first: the pins are tested with it.
decod_find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
        # Run it to find out: a name on the PATH may be a shim of a version that is not installed.
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "decod needs Python 3.11 or newer with the venv module; none was found on PATH" >&2
    return 1
}

# Prints a stamp of all that an installation depends on. $1: the extras, comma-separated.
decod_stamp() {
    cat "$decod_root/pyproject.toml" "$decod_root/constraints.txt" | cksum
    echo "at $decod_root with [$1]"
}

decod_install() {
    local extras="$1" venv="$decod_root/.venv" python
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        python="$(decod_find_python)" || return 1
        echo "setting up .venv with $("$python" --version) (a few minutes the first time)" >&2
        "$python" -m venv --clear "$venv" || return 1
    else
        echo "bringing .venv up to date" >&2
    fi
    # Earlier releases were installed as `decod`. Whoever removed that later would remove the command.
    if "$venv/bin/python" -Ic 'from importlib.metadata import version; version("decod")' 2>/dev/null; then
        "$venv/bin/python" -m pip uninstall -qq -y --disable-pip-version-check decod >&2 || return 1
    fi
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        -c "$decod_root/constraints.txt" -e "$decod_root${extras:+[$extras]}" >&2 || return 1
    decod_stamp "$extras" >"$venv/.decod-stamp"
}

# Makes sure that .venv holds decod with the extras $1 (may be empty).
decod_setup() {
    local extras="$1" stamp="$decod_root/.venv/.decod-stamp"
    # Two set-ups at once would break each other's installation, so the second waits.
    exec 9>"$decod_root/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    # An installation for the tests holds everything that a demo or the site needs.
    if ! { [ -f "$stamp" ] &&
        { [ "$(cat "$stamp")" = "$(decod_stamp "$extras")" ] ||
            [ "$(cat "$stamp")" = "$(decod_stamp dev,parquet,docs)" ]; }; }; then
        decod_install "$extras" || return 1
    fi
    exec 9>&-
}
