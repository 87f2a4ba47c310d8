"""The documentation: links, file names, options and commands in README.md, CONTRIBUTING.md and docs/."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onefile_rl import behaviors, curriculum
from onefile_rl.arguments import without

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [
    path.stem
    for pattern in ("ppo_*.py", "sac_*.py", "crossq_*.py", "lbc_*.py")
    for path in sorted(ROOT.glob(pattern))
]
# Names of copies that the pages make: a command with one of them takes the options of the script it is a copy of.
COPIES = {"sac_three": "sac_continuous"} | dict.fromkeys(
    ("my_ppo", "ppo_layernorm", "ppo_adamw", "ppo_klstop", "ppo_nextobs"),
    "ppo_continuous_multiagent",
)
# Pages about one script: options that they mention are this script's.
ABOUT = {
    "ppo.md": "ppo_continuous_multiagent",
    "discrete.md": "ppo_discrete_multiagent",
    "hybrid.md": "ppo_hybrid_multiagent",
    "lstm.md": "ppo_lstm_multiagent",
    "pixels.md": "ppo_pixel",
    "sac.md": "sac_continuous",
    "crossq.md": "crossq_continuous",
    "lbc.md": "lbc_discrete",
}
FOLDERS = ("benchmarks", "docs", "envs", "onefile_rl", "tests", ".ci")

# Options of programs that are not part of the repository.
FOREIGN = {
    "torchrun": """--nproc_per_node --nnodes --node_rank --master_addr --master_port --rdzv-backend --rdzv-endpoint
        --rdzv-id --rdzv-conf --max-restarts --log-dir --standalone --local-addr --master-addr""",
    "slurm": "--nodes --ntasks-per-node --cpus-per-task",
    "pip": "--no-deps",
    "ruff": "--check",
    "tensorboard": "--logdir",
    "godot": "--headless --import --path --fixed-fps --write-movie",
    "the Godot plugin": "--action_repeat",
    "mlagents-learn": "--env --run-id --force --initialize-from --resume --inference --deterministic",
}
FOREIGN = {option for options in FOREIGN.values() for option in options.split()}


# Markdown


class Page:
    """Text, code spans and commands of a page."""

    def __init__(self, path):
        self.path = path
        self.text = path.read_text()
        self.prose = []
        self.code = []  # blocks of lines
        fence = None
        block = []
        before = ""
        for line in [*self.text.splitlines(), ""]:
            if line.lstrip().startswith("```"):
                if fence is None:
                    fence = line.strip("` ")
                else:
                    self.code.append((fence, block))
                    fence = None
                block = []
            elif fence is not None or (line.startswith("    ") and (block or not before.strip())):
                block.append(line)
            else:
                if block:
                    self.code.append(("", block))
                block = []
                self.prose.append(line)
            before = line
        self.prose = "\n".join(self.prose)
        self.spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]

    def headings(self):
        """Anchors of the page, as GitHub makes them."""
        anchors = []
        for title in re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE):
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            count = anchors.count(anchor)
            anchors.append(f"{anchor}-{count}" if count else anchor)
        return anchors

    def links(self):
        prose = re.sub(r"`[^`]*`", "code", self.prose)
        yield from re.findall(r"\]\(([^)\s]+)\)", prose)
        yield from re.findall(r'<img src="([^"]+)"', prose)

    def block_commands(self):
        """Command lines of code blocks, continuation lines joined, without prompts and comments."""
        for _, block in self.code:
            text = "\n".join(line.strip() for line in block).replace("\\\n", " ")
            for line in text.splitlines():
                yield re.sub(r"\s+#\s.*", "", line.removeprefix("$ ")).strip()

    def commands(self):
        return [*self.block_commands(), *self.spans]


@cache
def pages():
    return [Page(path) for path in PAGES]


def check_pages(find):
    """Fail with everything that `find(page)` yields, one line each."""
    errors = [f"{page.path.relative_to(ROOT)}: {error}" for page in pages() for error in find(page)]
    assert not errors, "\n" + "\n".join(errors)


# Options


@cache
def script(name):
    return import_module(name)


def dashed(name):
    return "--" + name.replace("_", "-")


@cache
def script_options(name):
    options = {dashed(field.name) for field in fields(script(name).Args)}
    flags = {
        dashed(field.name) for field in fields(script(name).Args) if field.type in (bool, "bool")
    }
    return options | {"--no-" + flag[2:] for flag in flags} | {"--no-compile", "--help"}


@cache
def file_options(path):
    """Options of a command line program of the repository, read from its source: argparse's, or tyro's."""
    options = {"--help"}
    tree = ast.parse((ROOT / path).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    by_tyro = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "tyro.cli"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            options |= {
                x.value
                for x in node.args
                if isinstance(x, ast.Constant) and str(x.value).startswith("--")
            }
        if isinstance(node, ast.FunctionDef) and node.name in by_tyro:
            options |= {dashed(argument.arg) for argument in node.args.args}
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            options |= {dashed(x.target.id) for x in node.body if isinstance(x, ast.AnnAssign)}
    return options


@cache
def player_options():
    """Options of the bundled players, which are passed on by --player-args."""
    text = "".join(path.read_text() for path in sorted((ROOT / "envs/godot_scenes").glob("*.gd")))
    godot = set(re.findall(r"--[a-z][\w-]*", text))
    return file_options("envs/unity_scenes/player.py") | godot | {"--action_repeat"}


@cache
def options_on(page):
    """Options that the page of this name can mention outside of commands."""
    options = FOREIGN | player_options()
    for name in [ABOUT[page]] if page in ABOUT else SCRIPTS:
        options = options | script_options(name)
    for path in (
        *sorted(ROOT.glob("benchmarks/*.py")),
        ROOT / "unity_vec_env.py",
        ROOT / "godot_vec_env.py",
    ):
        options = options | file_options(path.relative_to(ROOT))
    return options


def mentioned(text):
    """Options in a text. Values of --player-args are not options of the command."""
    text = re.sub(r"(--player-args)[ =]\S+( +--\S+)?", r"\1", text)
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)


def python_command(command):
    """Program and arguments of a `python ...` command, or None."""
    command = re.sub(r"^(xvfb-run -a |nice )+", "", command)
    if not command.startswith("python "):
        return None
    first = re.split(r" && | \| ", command)[0]
    words = shlex.split(first)[1:]
    if words[0] == "-m":
        path = words[1].replace(".", "/") + ".py"
        return (path if (ROOT / path).exists() else None), words[2:]
    return words[0], words[1:]


def options_of(program, args):
    """Options that a program of the repository accepts; None: it is not one."""
    if program in (None, "SCRIPT"):
        return None
    name = program.removesuffix(".py")
    if name in SCRIPTS or name in COPIES:
        return script_options(COPIES.get(name, name))
    options = file_options(program)
    if program in (
        "benchmarks/learning.py",
        "benchmarks/beside_sb3.py",
        "benchmarks/tune.py",
    ):  # they pass options on to a script
        given = args[0].removesuffix(".py")
        names = {
            "sb3-ppo": SCRIPTS,
            "sb3-maskable-ppo": ["ppo_discrete_multiagent"],
            "sb3-sac": SCRIPTS,
            "sb3-crossq": SCRIPTS,
            "sb3-tqc": SCRIPTS,
            "sb3-ppo-pixel": ["ppo_pixel"],
            "SCRIPT": SCRIPTS,
        }
        for passed_to in names.get(given, [COPIES.get(given, given)]):
            options = options | script_options(passed_to)
    return options


# Tests


def test_links_exist():
    def missing(page):
        for link in page.links():
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            path = (page.path.parent / target).resolve() if target else page.path
            if not path.exists():
                yield f"{link} does not exist"
            elif anchor and anchor not in Page(path).headings():
                yield f"{link}: no such heading"

    check_pages(missing)


def test_files_in_backticks_exist():
    names = {
        path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()
    }
    names |= (
        {path.name for path in ROOT.iterdir()} | {f"{copy}.py" for copy in COPIES} | {"SCRIPT.py"}
    )

    def missing(page):
        for span in page.spans:
            for word in re.split(r"[\s,]+", span):
                word = word.partition(":")[0]
                if not re.fullmatch(r"[\w.-]+(/[\w.-]*)*", word):
                    continue
                if re.search(
                    r"(^|[./])[A-Z]{2,}([./]|$)", word
                ):  # a placeholder, as in ENV.SCRIPT.SEED.csv
                    continue
                folder, slash, _ = word.partition("/")
                if slash and folder in FOLDERS and not (ROOT / word).exists():
                    yield f"`{word}` does not exist"
                if not slash and word.endswith((".py", ".gd")) and word not in names:
                    yield f"`{word}` does not exist"

    check_pages(missing)


def test_options_exist():
    def unknown(page):
        inside = []  # commands whose program is known
        for command in page.commands():
            program = python_command(command)
            known = options_of(*program) if program else None
            if known is not None:
                inside += mentioned(command)
                yield from (
                    f"{option} in: {command}"
                    for option in mentioned(command)
                    if option not in known
                )
        everything = [
            mentioned(text) for text in (page.prose, *("\n".join(block) for _, block in page.code))
        ]
        rest = {option for options in everything for option in options} - set(inside)
        yield from (
            f"{option} is no option" for option in sorted(rest - options_on(page.path.name))
        )

    check_pages(unknown)


def test_player_options_exist():
    def unknown(page):
        for option in re.findall(r"--player-args[ =](--[a-z][\w-]*)", page.text):
            if option not in player_options():
                yield f"{option} is no option of the bundled players"

    check_pages(unknown)


def test_script_commands_parse():
    """Parse the commands of the scripts with the scripts' own parsers and checks."""

    def wrong(page):
        for command in page.commands():
            program, args = python_command(command) or (None, ())
            name = (program or "").removesuffix(".py")
            if name not in SCRIPTS or {"ID", "SEED", "--help"} & set(args):
                continue
            module = script(name)
            env_id = args[args.index("--env-id") + 1] if "--env-id" in args else module.Args.env_id
            preset = (
                {}
                if "--unity-path" in args or "--godot-path" in args
                else module.PRESETS.get(env_id, {})
            )
            default = module.Args(env_id=env_id, **preset)
            if "--curriculum" in args:
                lessons = curriculum.read(ROOT / args[args.index("--curriculum") + 1])
                default.env_parameters = without(lessons, default.env_parameters)
            flags = {"--compile": ["--compile", "True"], "--no-compile": ["--compile", "False"]}
            line = [word for arg in args for word in flags.get(arg, [arg])]
            line = behaviors.words_of(line, "A")  # each of several behaviors
            try:
                parsed = tyro.cli(module.Args, default=default, args=line)
                if "--unity-path" not in args and "--godot-path" not in args:
                    module.check(replace(parsed, compile=None))
            except (SystemExit, ValueError) as error:
                yield f"{command}: {error}"

    check_pages(wrong)


def test_diffs_apply():
    """The diffs of docs/change-a-script.md change lines that the scripts have."""
    diffs = [
        block for fence, block in Page(ROOT / "docs/change-a-script.md").code if fence == "diff"
    ]
    assert len(diffs) >= 5
    scripts = [(ROOT / f"{name}.py").read_text() for name in SCRIPTS]
    for diff in diffs:
        before = "\n".join(line[1:] for line in diff if not line.startswith("+"))
        assert any(f"\n{before}\n" in text for text in scripts), before


def run(command, folder, more=()):
    """Run a `python ...` command of the pages in a folder, with more arguments."""
    program, args = python_command(command)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(ROOT / program), *args, *more]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


PPO = "--num-steps 16 --num-minibatches 2 --update-epochs 1 --no-compile "
SHORT = {
    "python ppo_continuous_multiagent.py --env-id Reacher3Dof-v0": (
        PPO + "--num-envs 2 --num-steps 128 --total-timesteps 256"
    ),
    "python ppo_discrete_multiagent.py --env-id Basic": PPO + "--total-timesteps 512",
    "python ppo_hybrid_multiagent.py --env-id FoodCollector": PPO + "--total-timesteps 640",
    "python ppo_lstm_multiagent.py --env-id CartPoleBlind-v0": PPO
    + "--num-envs 2 --total-timesteps 64",
    "python ppo_pixel.py --env-id GridWorld": PPO + "--total-timesteps 288",
    "python sac_continuous.py --env-id 3DBall": (
        "--total-timesteps 240 --learning-starts 120 --buffer-size 500 --no-compile"
    ),
    "python crossq_continuous.py --env-id 3DBall": (
        "--total-timesteps 240 --learning-starts 120 --buffer-size 500 --no-compile"
    ),
    "python lbc_discrete.py --env-id CartPole-v1 --seed 1": (
        "--total-timesteps 320 --num-envs 2 --eval-interval 160 --no-compile"
    ),
}


def scalars(folder):
    """Names of the scalars in a run's TensorBoard log."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_commands_run(tmp_path):
    """Run one command of each script with few steps; docs/logged-metrics.md lists exactly the scalars that they log."""
    written = {command for page in pages() for command in page.block_commands()}
    assert set(SHORT) <= written, "the pages no longer have these commands: change SHORT too"
    assert {command.split()[1].removesuffix(".py") for command in SHORT} == set(SCRIPTS)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run, command, tmp_path, more.split()) for command, more in SHORT.items()
        ]
    for one in runs:
        one.result()
    folders = [path.parent for path in tmp_path.glob("runs/*/checkpoint.pt")]
    assert len(folders) == len(SHORT)

    logged = set().union(*map(scalars, folders))
    documented = {
        span
        for span in Page(ROOT / "docs/logged-metrics.md").spans
        if re.fullmatch(r"[a-z]+/\w+", span)
    }
    assert documented - {"unity/NAME", "godot/NAME"} == logged


def test_commands_for_an_existing_run(tmp_path):
    """Evaluate, resume and export a run with the commands of docs/runs.md."""
    written = {command for page in pages() for command in page.block_commands()}
    train = "python ppo_continuous_multiagent.py --env-id 3DBall --seed 1"
    evaluate = "python ppo_continuous_multiagent.py --evaluate runs/NAME --eval-episodes 24 --capture-video"
    resume = "python ppo_continuous_multiagent.py --resume runs/NAME --total-timesteps 1000000"
    export = "python ppo_continuous_multiagent.py --export runs/NAME"
    assert {train, evaluate, resume, export} <= written
    run(train, tmp_path, (PPO + "--total-timesteps 192 --player-args=--max-step=50").split())
    (folder,) = tmp_path.glob("runs/*")
    named = lambda command: command.replace("NAME", folder.name)
    assert "return" in run(named(evaluate), tmp_path, ["--no-capture-video"])
    run(named(resume), tmp_path, ["--total-timesteps", "384"])
    run(named(export), tmp_path)
    assert (folder / "policy.onnx").exists()


def test_readme_example_runs(tmp_path):
    """Run the Python example of the README unchanged."""
    readme = Page(ROOT / "README.md")
    (example,) = ["\n".join(block) for language, block in readme.code if language == "python"]
    line = [sys.executable, "-c", example]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("transitions complete") == 100


def find_godot():
    names = (os.environ.get("GODOT"), "godot", "godot4")
    return next((name for name in names if name and shutil.which(name)), None)


@pytest.mark.parametrize(
    ("page", "function", "prints"),
    [
        ("unity.md", "as_sb3", "12 agents, return "),
        ("unity.md", "as_pettingzoo", "returns {'agent_0': "),
        ("godot.md", "as_sb3", "16 agents, 1024 decisions"),
    ],
)
def test_examples_of_the_views_run(page, function, prints, tmp_path):
    """Run the examples of as_sb3 and as_pettingzoo unchanged. They are short."""
    if page == "godot.md" and not find_godot():
        pytest.skip("needs Godot")
    blocks = [block for fence, block in Page(ROOT / "docs" / page).code if fence == "python"]
    (example,) = [block for block in blocks if any(f" {function}\n" in f"{x}\n" for x in block)]
    assert len([line for line in example if line.strip()]) <= 12
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert prints in done.stdout


def test_readme_has_the_test_command():
    """The script .ci/run reads its test command from the README."""
    assert (
        "\n    pip install -r requirements.txt && python -m pytest\n"
        in (ROOT / "README.md").read_text()
    )
