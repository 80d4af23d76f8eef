# Sourced by launch.sh and test.sh: makes .venv and keeps it as requirements*.txt say. Not run by itself.
#
# What was installed is recorded in .venv/.decodeck-N: a hash of the N requirement files, the folder and the
# interpreter. While that fits, a start runs no pip. An install that was cut off leaves .venv/.decodeck-busy
# behind, and the next start makes the environment anew (pip's own cache keeps what was downloaded).
# An environment that is another checkout's is never installed into: `pip --editable` would turn that one's
# commands and imports to this folder.
# shellcheck shell=bash

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
readonly ROOT VENV PYTHON

# A program started in a folder that holds an "app" or "engine" of its own must not import those.
export PYTHONSAFEPATH=1

say() { printf 'decodeck: %s\n' "$*" >&2; }
fail() {
    say "$@"
    exit 1
}

# The system packages that Qt's libraries load, by the file that is missing when they are not there.
qt_package() {
    case "$1" in
        libEGL.so.1) echo libegl1 ;;
        libGL.so.1 | libGLX.so.0 | libOpenGL.so.0) echo libgl1 ;;
        libX11.so.6) echo libx11-6 ;;
        libX11-xcb.so.1) echo libx11-xcb1 ;;
        libdbus-1.so.3) echo libdbus-1-3 ;;
        libfontconfig.so.1) echo libfontconfig1 ;;
        libfreetype.so.6) echo libfreetype6 ;;
        libglib-2.0.so.0 | libgthread-2.0.so.0) echo libglib2.0-0 ;;
        libxcb-cursor.so.0) echo libxcb-cursor0 ;;
        libxcb-icccm.so.4) echo libxcb-icccm4 ;;
        libxcb-image.so.0) echo libxcb-image0 ;;
        libxcb-keysyms.so.1) echo libxcb-keysyms1 ;;
        libxcb-randr.so.0) echo libxcb-randr0 ;;
        libxcb-render-util.so.0) echo libxcb-render-util0 ;;
        libxcb-render.so.0) echo libxcb-render0 ;;
        libxcb-shape.so.0) echo libxcb-shape0 ;;
        libxcb-shm.so.0) echo libxcb-shm0 ;;
        libxcb-sync.so.1) echo libxcb-sync1 ;;
        libxcb-util.so.1) echo libxcb-util1 ;;
        libxcb-xfixes.so.0) echo libxcb-xfixes0 ;;
        libxcb-xkb.so.1) echo libxcb-xkb1 ;;
        libxcb.so.1) echo libxcb1 ;;
        libxkbcommon.so.0) echo libxkbcommon0 ;;
        libxkbcommon-x11.so.0) echo libxkbcommon-x11-0 ;;
        libz.so.1) echo zlib1g ;;
        libzstd.so.1) echo libzstd1 ;;
        libstdc++.so.6) echo libstdc++6 ;;
        libgomp.so.1) echo libgomp1 ;;
        *) return 1 ;;
    esac
}

# apt_install WHY PACKAGE...: as root, or through sudo; else says the exact line and ends.
apt_install() {
    local why="$1" line
    local -a as_root=()
    shift
    line="apt-get install -y --no-install-recommends $*"
    command -v apt-get >/dev/null ||
        fail "$why. This system has no apt-get; install what corresponds to: $*"
    if [[ "$(id -u)" != 0 ]]; then
        if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
            as_root=(sudo -n)
        elif command -v sudo >/dev/null && [[ -t 0 ]]; then
            as_root=(sudo) # asks for the password on this terminal
        else
            fail "$why. Run this line, then start again:
    sudo apt-get update && sudo $line"
        fi
    fi
    say "$why; running: $line"
    "${as_root[@]}" apt-get update -qq >&2 ||
        say "apt-get update did not work everywhere; going on with the lists that are there"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 ||
        fail "$why, and apt-get could not install them. Run this line to see why: $line"
}

# The interpreter for a new environment: DECODECK_PYTHON, or the first of the usual names that is 3.11 to 3.13.
find_python() {
    local name seen=""
    for name in ${DECODECK_PYTHON:+"$DECODECK_PYTHON"} python3 python3.13 python3.12 python3.11; do
        command -v "$name" >/dev/null || continue
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
        seen+=" $name ($("$name" -V 2>&1))"
    done
    fail "Python 3.11, 3.12 or 3.13 is needed;${seen:+ found only$seen.} Install one (Debian 12, Ubuntu 24.04:
    sudo apt-get install python3 python3-venv), or name it with DECODECK_PYTHON=/path/to/python3.12"
}

make_venv() {
    local base
    base="$(find_python)" || exit 1
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install "$base cannot make environments (its venv module is missing)" \
            "python$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
    say "making the Python environment $VENV with $("$base" -V)"
    "$base" -m venv --clear "$VENV" || fail "$base -m venv could not make $VENV (see above)"
}

# What the environment must have been made from. Cheap: it runs on each start.
wanted() { # REQUIREMENT_FILE...
    printf '%s\n%s\n' "$ROOT" "$(readlink -f -- "$PYTHON" 2>/dev/null)"
    cat -- "$@" "$ROOT/pyproject.toml" | sha256sum
}

install_packages() { # REQUIREMENT_FILE...
    local file busy="$VENV/.decodeck-busy" rc=0
    local -a args=()
    for file in "$@"; do args+=(-r "$file"); done
    "$PYTHON" -I -c 'import pip' 2>/dev/null || "$PYTHON" -m ensurepip >&2 || fail "there is no pip in $VENV"
    say "installing the packages of ${*##*/} (the first time torch is the large one; pip shows each download)"
    : >"$busy"
    trap 'exit 130' INT # pip answers Ctrl-C with status 1, as if nothing were half done
    "$PYTHON" -m pip install --disable-pip-version-check --no-input "${args[@]}" >&2 || rc=$?
    if [[ "$rc" == 0 ]]; then
        # Editable: gives the commands decodeck and decodeck-engine, and imports straight from this folder.
        "$PYTHON" -m pip install --disable-pip-version-check --no-input -qq --no-deps --no-build-isolation \
            --editable "$ROOT" >&2 || rc=$?
    fi
    # When pip was killed, a package may be half there; when it gave up by itself, nothing is.
    trap - INT
    [[ "$rc" -gt 2 ]] || rm -f -- "$busy"
    [[ "$rc" == 0 ]] || fail "pip could not install the packages (see above). Check the network, the proxy and the
    free space ($(df -h --output=avail "$VENV" | tail -n 1 | tr -d ' ') on this disk), then start again"
}

# Qt's own libraries are in the environment; asks the loader which system ones they lack.
install_qt_libraries() {
    local qt file library package
    local -a packages=() unknown=()
    [[ "$(uname -s)" == Linux ]] || return 0
    command -v ldd >/dev/null || return 0
    qt="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("PySide6").submodule_search_locations[0])')" ||
        fail "PySide6 is not in $VENV; remove that folder and start again"
    while read -r library; do
        if package="$(qt_package "$library")"; then packages+=("$package"); else unknown+=("$library"); fi
    done < <(for file in "$qt"/Qt/plugins/platforms/libqxcb.so "$qt"/Qt/plugins/platforms/libqoffscreen.so \
        "$qt"/QtWidgets.abi3.so "$qt"/QtSvg.abi3.so; do
        [[ -e "$file" ]] && ldd "$file" 2>/dev/null
    done | awk '/not found/ { print $1 }' | sort -u)
    [[ ${#unknown[@]} == 0 ]] || say "Qt lacks system libraries whose package is not known here: ${unknown[*]}"
    [[ ${#packages[@]} == 0 ]] && return 0
    mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
    apt_install "Qt lacks ${#packages[@]} system libraries" "${packages[@]}"
}

installed() { # REQUIREMENT_FILE...
    local stamp="$VENV/.decodeck-$#"
    [[ -f "$stamp" && ! -e "$VENV/.decodeck-busy" && "$(wanted "$@")" == "$(<"$stamp")" ]]
}

# Ends where an install would go into an environment that this checkout does not have for itself alone.
refuse_shared() {
    local stamp owner=""
    for stamp in "$VENV"/.decodeck-[0-9]*; do
        [[ -f "$stamp" ]] || continue
        IFS= read -r owner <"$stamp" || true
        break
    done
    [[ "$owner" != "$ROOT" ]] || return 0
    if [[ -L "$VENV" && "$(readlink -f -- "$VENV")" != "$ROOT"/* ]]; then
        fail "$VENV is a link to $(readlink -- "$VENV"), which was not set up for this folder${owner:+ but for $owner},
    and installing from here would make that environment run this checkout. Remove the link, then start again:
    rm '$VENV'"
    fi
    # A folder that was moved or copied here with its environment has that for itself.
    if [[ -n "$owner" && "$owner/.venv" -ef "$VENV" ]]; then
        fail "$VENV was set up for $owner, whose .venv is the same folder, and installing from here would make it run
    this checkout. Remove the link there, and that checkout makes its own at its next start: rm '$owner/.venv'"
    fi
}

# setup REQUIREMENT_FILE...: after it, $PYTHON runs Decodeck with these packages.
setup() {
    local n
    [[ "$ROOT" != *:* ]] || fail "the folder $ROOT has a colon in its name, which Python environments cannot have"
    installed "$@" && return 0
    # Two first starts at once would write over each other; the second waits and finds the work done.
    if command -v flock >/dev/null; then
        exec 9>"$ROOT/.venv.lock"
        flock -n 9 || { say "waiting for another start that is installing"; flock 9; }
    fi
    if ! installed "$@"; then
        refuse_shared
        if [[ -e "$VENV/.decodeck-busy" ]]; then
            say "the last install was cut off; making the environment anew"
            make_venv
        elif ! "$PYTHON" -I -c '' 2>/dev/null; then
            make_venv
        fi
        install_packages "$@"
        install_qt_libraries
        # The first n files are contained in all of them, so a start that wants only those is served as well.
        for ((n = 1; n <= $#; n++)); do wanted "${@:1:n}" >"$VENV/.decodeck-$n"; done
    fi
    exec 9>&-
}
