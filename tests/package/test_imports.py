"""Imports go one way: scripts -> onefile_rl -> envs -> unity_vec_env, godot_vec_env -> onefile_rl.engines."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

LAYERS = ("scripts", "onefile_rl", "envs", "unity_vec_env and godot_vec_env", "onefile_rl.engines")


def find_modules(root):
    """Return the Python files of the project by module name. Tests and benchmarks may import anything."""
    modules = {}
    for path in [*root.glob("*.py"), *root.glob("onefile_rl/**/*.py"), *root.glob("envs/**/*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        modules[".".join(parts)] = path
    return modules


def layer_of(module):
    # Python runs onefile_rl/__init__.py before any module of the package, so it belongs to the lowest layer.
    if module == "onefile_rl" or module.startswith("onefile_rl.engines"):
        return 4
    if module in ("unity_vec_env", "godot_vec_env"):
        return 3
    if module == "envs" or module.startswith("envs."):
        return 2
    if module.startswith("onefile_rl."):
        return 1
    return 0


def imports_of(module, path, modules):
    """Return the modules of the project that a file imports, also inside functions."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                source = ".".join([*parents, *([source] if source else [])])
            for alias in node.names:
                # `from package import module` imports a module, `from module import name` a name.
                name = f"{source}.{alias.name}"
                found.add(name if name in modules else source)
    return (found & modules.keys()) - {module}


def find_problems(root):
    """Return a line for each import against the order, and for a cycle if there is one."""
    modules = find_modules(root)
    graph = {module: imports_of(module, path, modules) for module, path in modules.items()}
    problems = []
    for module, imports in sorted(graph.items()):
        for imported in sorted(imports):
            if layer_of(module) == layer_of(imported) == 0:
                problems.append(f"the script {module} imports the script {imported}")
            elif layer_of(module) > layer_of(imported):
                above, below = LAYERS[layer_of(imported)], LAYERS[layer_of(module)]
                problems.append(f"{module} imports {imported}: {below} must not import {above}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append(f"cycle: {' -> '.join(reversed(error.args[1]))}")
    return problems


def test_imports_follow_the_order_of_the_layers():
    assert find_problems(ROOT) == []


def test_every_layer_is_found():
    assert {layer_of(module) for module in find_modules(ROOT)} == set(range(len(LAYERS)))


FILES = {
    "my_ppo.py": "from onefile_rl import runs\nfrom envs.make import make_envs",
    "my_sac.py": "import envs.make",
    "unity_vec_env.py": "from onefile_rl.engines import process",
    "onefile_rl/__init__.py": "",
    "onefile_rl/runs.py": "import numpy",
    "onefile_rl/fast/__init__.py": "from onefile_rl.fast.acting import Acting",
    "onefile_rl/fast/acting.py": "class Acting: pass",
    "onefile_rl/engines/__init__.py": "",
    "onefile_rl/engines/process.py": "",
    "envs/__init__.py": "",
    "envs/make.py": "from unity_vec_env import UnityVecEnv\nfrom . import rendering",
    "envs/rendering.py": "",
}


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("my_ppo.py", FILES["my_ppo.py"], None),
        ("my_ppo.py", "import my_sac", "the script my_ppo imports the script my_sac"),
        (
            "my_ppo.py",
            "def main():\n    from my_sac import Agent",
            "the script my_ppo imports the script my_sac",
        ),
        ("onefile_rl/runs.py", "import my_ppo", "onefile_rl must not import scripts"),
        (
            "onefile_rl/__init__.py",
            "from onefile_rl import runs",
            "onefile_rl.engines must not import onefile_rl",
        ),
        ("envs/make.py", "from onefile_rl.runs import Run", "envs must not import onefile_rl"),
        ("envs/rendering.py", "from .make import x", "cycle: envs."),
        ("onefile_rl/fast/acting.py", "from onefile_rl import fast", "cycle: onefile_rl.fast"),
        ("unity_vec_env.py", "import envs", "unity_vec_env and godot_vec_env must not import envs"),
        (
            "onefile_rl/engines/process.py",
            "from onefile_rl import runs",
            "onefile_rl.engines must not import onefile_rl",
        ),
    ],
)
def test_an_import_against_the_order_is_found(path, text, problem, tmp_path):
    for name, content in {**FILES, path: text}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    problems = find_problems(tmp_path)
    if problem is None:
        assert problems == []
    else:
        assert any(problem in line for line in problems), problems
