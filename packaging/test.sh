#!/usr/bin/env bash
# Sets up as launch.sh does, with the test tools, and runs ruff, mypy and pytest. Arguments go to pytest.
set -euo pipefail
# shellcheck source=packaging/setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    cat <<'TEXT'
usage: bash packaging/test.sh [PYTEST_ARGUMENT...]

Makes .venv as launch.sh does, with the test tools, fetches the demo model, then runs ruff, mypy and pytest.
Arguments go to pytest: bash packaging/test.sh tests/engine -k oracle
TEXT
    exit 0
fi

setup "$ROOT/packaging/requirements.txt" "$ROOT/packaging/requirements-dev.txt"
cd -- "$ROOT"
export QT_QPA_PLATFORM="${QT_QPA_PLATFORM:-offscreen}"
"$PYTHON" -m app.demo_model >/dev/null

status=0
step() {
    say "$1"
    shift
    "$@" || {
        status=1
        say "failed: $*"
    }
}
step "ruff" "$PYTHON" -m ruff check .
step "ruff format" "$PYTHON" -m ruff format --check .
step "mypy" "$PYTHON" -m mypy
step "pytest" "$PYTHON" -m pytest -n 2 --dist loadfile "$@"
exit "$status"
