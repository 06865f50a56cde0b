"""Stands in for the Python of an environment. It plays what the set-up asks of one, writes each call to
calls.txt in the clone, and goes wrong as faults.json there says. Run without site-packages."""

# A set-up starts this script a dozen times, and importing pathlib would take longer than all the rest.
# ruff: noqa: PTH100, PTH101, PTH110, PTH118, PTH120, PTH123

import json
import os
import sys
import time

VENV = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))
CLONE = os.path.dirname(VENV)
ARGUMENTS = sys.argv[1:]
WORDS = " ".join(ARGUMENTS)

CLI = """#!{python} -IS
import json, os, sys
clone = {clone!r}
with open(os.path.join(clone, "calls.txt"), "a") as calls:
    calls.write("nemolocal " + " ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:] == ["models", "pull", "starter"]:
    if os.path.exists(os.path.join(clone, "no-model")):
        print("The hub cannot be reached. Check the connection.", file=sys.stderr)
        sys.exit(1)
    os.makedirs(os.path.join(clone, "models", "starter"), exist_ok=True)
    open(os.path.join(clone, "models", "starter", "model.gguf"), "w").close()
else:
    print(json.dumps(sys.argv[1:]), flush=True)
    if "--stay" in sys.argv:
        import time
        time.sleep(60)
    sys.exit(7 if "--fail" in sys.argv else 0)
"""


def path_of(name):
    return os.path.join(VENV, name)


def go_wrong():
    try:
        with open(os.path.join(CLONE, "faults.json")) as file:
            faults = json.load(file)
    except OSError:
        return
    for words, fault in faults.items():
        if words in WORDS:
            time.sleep(fault.get("sleeps_s", 0))
            print(fault.get("says", ""), flush=True)
            if fault.get("exit"):
                sys.exit(fault["exit"])


def play():
    if "sys.version_info[:2]" in WORDS:
        print(sys.version_info[:2])
    elif "sysconfig" in WORDS:
        print(path_of("site-packages"))
    elif "llama_cpp" in WORDS:
        if not os.path.exists(path_of("engine")):
            sys.exit("ModuleNotFoundError: No module named 'llama_cpp'")
        with open(path_of("engine")) as file:
            print("engine", file.read(), "True")
    elif "models_dir" in WORDS:
        print(os.path.join(CLONE, "models"))
    elif "pip install" in WORDS and ARGUMENTS[-1].startswith("llama-cpp-python=="):
        with open(path_of("engine"), "w") as file:
            file.write(ARGUMENTS[-1].split("==")[1])
    elif "pip install" in WORDS and "-e" in ARGUMENTS:
        cli = path_of("bin/nemolocal")
        with open(cli, "w") as file:
            file.write(CLI.format(python=sys.executable, clone=CLONE))
        os.chmod(cli, 0o755)


with open(os.path.join(CLONE, "calls.txt"), "a") as calls:
    calls.write(WORDS + "\n")
go_wrong()
play()
