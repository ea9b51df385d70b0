#!/usr/bin/env bash
# The wheel in an empty environment: what it installs, how large that is, and written tests in a project that has
# packages named ci, tests and engine of its own. Usage: tests/packaging.sh; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
# From what is committed: a build leaves folders behind, and takes up what an earlier one has left.
mkdir "$work/source"
git archive HEAD | tar x -C "$work/source"
"$work/env/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$work/source"
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
before=$(du -sm "$site" | cut -f1)
"$work/env/bin/pip" install --quiet --disable-pip-version-check "$work"/lockstep_engine-*.whl
echo "site-packages: $(($(du -sm "$site" | cut -f1) - before)) MB"
echo "top level of the wheel: $(unzip -Z1 "$work"/lockstep_engine-*.whl | cut -d/ -f1 | sort -u | tr '\n' ' ')"
mkdir -p "$work/project/ci" "$work/project/tests"
touch "$work/project/ci/__init__.py" "$work/project/tests/__init__.py"
cd "$work/project"
"$work/env/bin/scripted" new race --dir tests
"$work/env/bin/python" -m pytest -q tests/test_race.py
mkdir engine
echo "ANSWER = 42" >engine/__init__.py
cp "$work"/source/examples/your_scheduler/{fixed,adapter,scheduler}.py .
"$work/env/bin/scripted" new other --dir tests --adapter fixed.py
printf 'from engine import ANSWER\n\n\ndef test_own():\n    assert ANSWER == 42\n' >tests/test_own.py
"$work/env/bin/pytest" -q tests/test_other.py tests/test_own.py
"$work/env/bin/python" -m pytest -q tests/test_other.py tests/test_own.py
# The scheduler itself in the package engine, its adapter in the package adapters.
mkdir adapters
touch adapters/__init__.py
cp scheduler.py engine/scheduler.py
for name in adapter fixed; do
    sed -e 's/from scheduler import/from engine.scheduler import/' "$name.py" >"adapters/$name.py"
done
rm adapter.py fixed.py scheduler.py tests/test_other.py
"$work/env/bin/scripted" new packaged --dir tests --adapter adapters/fixed.py
"$work/env/bin/pytest" -q tests/test_packaged.py tests/test_own.py
"$work/env/bin/scripted" explore --adapter adapters/fixed.py --schedules 100
for name in adapters ci benchmarks tests; do
    if unzip -Z1 "$work"/lockstep_engine-*.whl | grep -q "^$name/"; then
        echo "the wheel brings a package $name" >&2
        exit 1
    fi
done
if "$work/env/bin/python" -m pytest -q tests/test_race.py >"$work/refused" 2>&1; then
    echo "a package named engine went unnoticed" >&2
    exit 1
fi
grep -E "must be Lockstep's|cannot import name 'EngineConfig' from 'engine' " "$work/refused"
"$work/env/bin/engine" serve 2>"$work/refused" && exit 1
grep "pip install 'lockstep-engine\[serve\]'" "$work/refused"
