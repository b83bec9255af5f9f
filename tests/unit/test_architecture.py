"""The shape of the house, read from the source with `ast`: nothing is imported.

It takes seconds, so it also runs before each commit. The rules are those of the design: imports
flow down the floors, few modules may touch the outside world, there are no hidden globals, and
every option is read by something.
"""

import ast
import functools
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Packages and modules by floor; those of one floor are siblings.
FLOORS = [
    {"mcore.errors", "mcore.log", "mcore.signals", "mcore.notice", "mcore.device"}
    | {"mcore.version", "mcore.kernels"},
    # The layouts of ranks and stages are plain integers, which options are checked against.
    {
        "mcore.topology.rank_layout",
        "mcore.topology.placement",
        "mcore.topology.stage_layout",
        "mcore.topology.stages",
    },
    {"mcore.config", "mcore.num_microbatches_calculator"},
    {"mcore.topology"},
    {"mcore.parallel_state"},
    {"mcore.tensor_parallel", "mcore.pipeline_parallel", "mcore.distributed"},
    {"mcore.transformer"},
    {"mcore.models", "mcore.optimizer", "mcore.checkpoint", "mcore.data", "mcore.tokenizers"},
    {
        "mcore.training",
        "mcore.planner",
        "mcore.deepspeed",
        "mcore.convert",
        "mcore.generation",
        "mcore.selftest",
    },
    {"mcore.cli", "pretrain_gpt", "tools", "examples"},
]
#: Siblings that may use each other all the same: the small modules at the bottom, what composes the
#: rest at the top, and conversion and generation, which need a model set up as training does.
FREE_FLOORS = {0, 1, 2, 8, 9}

#: Tighter than the floors: what these packages may not import although it lies below them.
FORBIDDEN = {
    "mcore.transformer": {"mcore.pipeline_parallel", "mcore.distributed"},
    "mcore.models": {"mcore.pipeline_parallel", "mcore.distributed"},
    "mcore.optimizer": {"mcore.tensor_parallel", "mcore.pipeline_parallel", "mcore.transformer"},
    "mcore.checkpoint": set().union(*FLOORS[5:7]),
    "mcore.data": set().union(*FLOORS[5:7]),
    "mcore.tokenizers": set().union(*FLOORS[5:7]),
}

#: Modules that only repeat names under the path where Megatron's users look for them.
ALIASES = {"mcore.utils", "mcore.model_parallel_config", "mcore.optimizer_param_scheduler"}

#: Who may touch what; an entry is a module or a package.
MAY_TOUCH = {
    "torch.distributed": {
        "mcore.topology.process_groups",
        "mcore.topology.collectives",
        "mcore.topology.group",  # asks a raw group for its members
        "mcore.pipeline_parallel.p2p_communication",
        "mcore.distributed",
        "mcore.checkpoint",
        "mcore.training.initialize",
        "mcore.planner.dry_run",
        "mcore.testing",
        "mcore.cli.launcher",  # takes torchrun's words as its own parser does
        "examples",  # users' programs join the job themselves
        # read other programs' metadata, whose classes are torch.distributed.checkpoint's
        "mcore.convert.safe_pickle",
        "mcore.convert.megatron_dist",
    },
    "torch.cuda": {"mcore.device"},
    "os.environ": {"mcore.training.initialize", "mcore.testing", "tools"},
    "argparse": {
        "mcore.config.command_line",  # makes every program's flags from configuration fields
        "mcore.training.arguments",
        "mcore.convert.megatron_args",  # Megatron's checkpoints hold a namespace
        "mcore.cli",
        "tools",
        "examples",
    },
    "sys.argv": {"mcore.training.pretrain", "mcore.cli", "tools", "examples"},
    "print": {"mcore.cli", "tools", "examples"},
    "files": {
        "mcore.signals",  # asks the kernel which processes are alive
        "mcore.notice",  # memory that processes share is opened as a file
        "mcore.data",
        "mcore.checkpoint",
        "mcore.training",
        "mcore.tokenizers",
        "mcore.convert",
        "mcore.deepspeed",
        "mcore.testing",
        "mcore.cli",
        "tools",
        "examples",
    },
}

#: The only module-level state that changes.
MUTABLE_GLOBALS = {
    "mcore.parallel_state._CONTEXT",  # the groups of this process
    "mcore.tensor_parallel.random._TRACKER",  # the process's random states are global by nature
    "mcore.num_microbatches_calculator._CALCULATOR",  # Megatron's module interface
}

#: Public edges that may ask for the global context where the caller gave no group.
CONTEXT_EDGES = {
    "mcore",
    "mcore.cli.generate",  # makes the groups
    "mcore.distributed.ddp",
    "mcore.distributed.fully_sharded",
    "mcore.models.gpt.gpt_model",
    "mcore.models.gpt.layer_range",
    "mcore.optimizer.optimizer",
    "mcore.pipeline_parallel.schedules",
    "mcore.selftest.selftest",  # makes the groups
    "mcore.tensor_parallel.attributes",
    "mcore.tensor_parallel.cross_entropy",
    "mcore.tensor_parallel.data",
    "mcore.tensor_parallel.embedding",
    "mcore.tensor_parallel.layers",
    "mcore.tensor_parallel.linear_function",
    "mcore.tensor_parallel.mappings",
    "mcore.tensor_parallel.random",
    "mcore.tensor_parallel.utils",
    "mcore.testing.distributed",
    "mcore.testing.torchrun",
    "mcore.training.initialize",
    "mcore.transformer.block",
    "mcore.transformer.layer",
}

#: Options that have acted before the run starts, and how.
SETTLED_EARLY = {
    "TrainingConfig.bf16": "arguments.py turns it into params_dtype",
    "OptimizerConfig.main_params_dtype": "one value is built, others are refused",
    "OptimizerConfig.muon_tp_mode": "one value is built, others are refused",
    "DataConfig.dataloader_type": "one value is built, others are refused",
    "TransformerConfig.recompute_method": "one value is built, recomputation is refused without it",
}

#: `mcore/__init__.py` loads its names on first use, so that `import mcore` needs no torch.
LAZY_PACKAGES = {"mcore"}


# --- reading the source


@functools.cache
def _modules():
    """Every first-party module: name -> (path, syntax tree)."""
    paths = [
        *ROOT.glob("mcore/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
        *ROOT.glob("examples/**/*.py"),
        *ROOT.glob("pretrain_gpt.py"),
    ]
    modules = {}
    for path in sorted(paths):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = (path, ast.parse(path.read_text(), str(path)))
    return modules


def _library():
    return {name: tree for name, (_, tree) in _modules().items() if name.split(".")[0] == "mcore"}


def _first_party(name):
    return name.split(".")[0] in {"mcore", "tools", "examples", "pretrain_gpt"}


def _imports(tree, module):
    """(line, module imported, inside a function) of every first-party import."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            names = [
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in _modules()
                else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            if _first_party(name):
                yield node.lineno, name, id(node) in inside


def _within(module, places):
    return any(module == place or module.startswith(place + ".") for place in places)


def _package(module):
    """The package or module of `FLOORS` that a module belongs to."""
    parts = [part for part in itertools.chain(*FLOORS) if _within(module, [part])]
    return max(parts, key=len, default=None)


def _floor(package):
    return next(level for level, floor in enumerate(FLOORS) if package in floor)


def _fail_on(problems):
    found = sorted(set(problems))
    assert not found, "\n" + "\n".join(found)


def _chain(node):
    """`a.b.c` of an attribute access, or None where it does not start at a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _qualified(tree):
    """Function from a node to its dotted name with import aliases resolved."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def resolve(node):
        chain = _chain(node)
        if chain is None:
            return ""
        head, _, tail = chain.partition(".")
        return ".".join(filter(None, [aliases.get(head, head), tail]))

    return resolve


# --- how modules import each other


def test_every_module_has_a_floor():
    _fail_on(
        name
        for name in _modules()
        if _package(name) is None
        and name not in ALIASES | LAZY_PACKAGES | {"mcore.testing", "mcore.__main__"}
        and not name.startswith("mcore.testing.")
    )


def test_imports_flow_down():
    problems = []
    for module, (_, tree) in _modules().items():
        mine = _package(module)
        if mine is None:
            continue
        for line, target, _ in _imports(tree, module):
            theirs = _package(target)
            where = f"{module}:{line} imports {target}"
            if theirs is None:
                if not _within(target, LAZY_PACKAGES) or target in ALIASES:
                    problems.append(f"{where}: use the module that it repeats")
                continue
            if theirs == mine:
                continue
            if _floor(theirs) > _floor(mine):
                problems.append(f"{where}: upward")
            elif _floor(theirs) == _floor(mine) and _floor(mine) not in FREE_FLOORS:
                problems.append(f"{where}: a sibling")
            elif theirs in FORBIDDEN.get(mine, ()):
                problems.append(f"{where}: {mine} may not use {theirs}")
    _fail_on(problems)


def test_the_test_harness_is_for_tests():
    _fail_on(
        f"{module}:{line} imports {target}"
        for module, (_, tree) in _modules().items()
        if not _within(module, ["mcore.testing"])
        for line, target, _ in _imports(tree, module)
        if _within(target, ["mcore.testing"])
    )


def test_no_first_party_import_hides_in_a_function():
    _fail_on(
        f"{module}:{line} imports {target} inside a function"
        for module, (_, tree) in _modules().items()
        for line, target, inside in _imports(tree, module)
        if inside
    )


def test_no_import_of_everything():
    _fail_on(
        f"{module}:{node.lineno}"
        for module, (_, tree) in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    )


def test_no_cycles():
    graph = {
        module: {target for _, target, _ in _imports(tree, module) if target in _modules()}
        for module, (_, tree) in _modules().items()
        if module not in LAZY_PACKAGES
    }
    done, path = set(), []

    def visit(module):
        if module in path:
            return " -> ".join([*path[path.index(module) :], module])
        if module in done or module not in graph:
            return None
        path.append(module)
        found = next(filter(None, map(visit, sorted(graph[module]))), None)
        path.pop()
        done.add(module)
        return found

    _fail_on(filter(None, map(visit, sorted(graph))))


def test_the_global_context_is_read_at_edges_only():
    _fail_on(
        f"{module}:{line} reads mcore.parallel_state; take a group or a context"
        for module, tree in _library().items()
        if module not in CONTEXT_EDGES
        for line, target, _ in _imports(tree, module)
        if target == "mcore.parallel_state"
    )


def test_packages_only_repeat_names():
    problems = []
    for module, (path, tree) in _modules().items():
        if (path.name != "__init__.py" and module not in ALIASES) or module in LAZY_PACKAGES:
            continue
        for node in tree.body:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if not (is_docstring or is_all or isinstance(node, (ast.Import, ast.ImportFrom))):
                problems.append(f"{module}:{node.lineno} {ast.unparse(node)[:60]}")
    _fail_on(problems)


# --- who touches what

_FILE_METHODS = {"read_text", "write_text", "read_bytes", "write_bytes", "open", "mkdir", "unlink"}


_NAMES = {
    "torch.cuda": "torch.cuda",
    "os.environ": "os.environ",
    "os.getenv": "os.environ",
    "os.putenv": "os.environ",
    "sys.argv": "sys.argv",
}
_CALLS = {"print": "print", "open": "files", "os.remove": "files", "os.replace": "files"}


def _touches(tree):
    """(line, what) of every use of something that `MAY_TOUCH` guards."""
    resolve = _qualified(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = resolve(node.func)
            if name.startswith("torch.distributed."):
                yield node.lineno, "torch.distributed"
            elif name in _CALLS:
                yield node.lineno, _CALLS[name]
            elif isinstance(node.func, ast.Attribute) and node.func.attr in _FILE_METHODS:
                yield node.lineno, "files"
        elif isinstance(node, ast.Attribute) and resolve(node) in _NAMES:
            yield node.lineno, _NAMES[resolve(node)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported = {str(node.module), *(f"{node.module}.{name}" for name in imported)}
            for guarded in imported & {"argparse", "torch.cuda"}:
                yield node.lineno, guarded


@pytest.mark.parametrize("what", MAY_TOUCH)
def test_touched_only_where_it_belongs(what):
    _fail_on(
        f"{module}:{line} touches {what}"
        for module, (_, tree) in _modules().items()
        if not _within(module, MAY_TOUCH[what])
        for line, touched in _touches(tree)
        if touched == what
    )


def test_run_configuration_stays_on_the_top_floors():
    _fail_on(
        f"{module}:{node.lineno} uses {name}"
        for module, tree in _library().items()
        if _package(module) and _floor(_package(module)) < 8 and module != "mcore.config.run"
        for node in ast.walk(tree)
        for name in [getattr(node, "id", None) or getattr(node, "attr", None)]
        if name in {"RunConfig", "Namespace"}
        if not _within(module, ["mcore.config"])
    )


# --- state

_MUTATORS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def _assigned(node):
    """(name, value) of an assignment to one plain name."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign):
        target, value = node.target, node.value
    else:
        return None, None
    return (target.id, value) if isinstance(target, ast.Name) else (None, None)


@functools.cache
def _changing_classes():
    """First-party classes whose instances can change: not frozen, no enum, tuple, protocol."""
    names = set()
    for tree in _library().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases}
                frozen = any("frozen=True" in ast.unparse(d) for d in node.decorator_list)
                if not frozen and not bases & {"Enum", "NamedTuple", "Protocol", "StrEnum"}:
                    names.add(node.name)
    return names


def _changes(tree, name):
    """Whether a container is changed in place anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _chain(node.func.value) == name and node.func.attr in _MUTATORS:
                return True
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if _chain(node.value) == name:
                return True
        elif isinstance(node, ast.AugAssign) and _chain(node.target) == name:
            return True
    return False


def test_no_mutable_globals():
    problems = []
    for module, tree in _library().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                problems += [(module, name, node.lineno) for name in node.names]
        for node in tree.body:
            name, value = _assigned(node)
            if name is None or value is None:
                continue
            is_object = (
                isinstance(value, ast.Call)
                and (_chain(value.func) or "").split(".")[-1] in _changing_classes()
            )
            if is_object or _changes(tree, name):
                problems.append((module, name, node.lineno))
    _fail_on(
        f"{module}:{line} {name} is state of the process"
        for module, name, line in problems
        if f"{module}.{name}" not in MUTABLE_GLOBALS
    )


def _is_probe(node):
    """`hasattr(x, ...)` or `getattr(x, "name", default)`, save of modules that vary by platform."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or not node.args:
        return False
    if _chain(node.args[0]) in {"os", "signal", "torch"}:
        return False
    named = len(node.args) == 3 and isinstance(node.args[1], ast.Constant)
    return node.func.id == "hasattr" or (node.func.id == "getattr" and named)


def test_nothing_is_probed_for():
    _fail_on(
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, (_, tree) in _modules().items()
        for node in ast.walk(tree)
        if _is_probe(node)
    )


# --- configuration


def _config_fields():
    """(module, class, field, line) of every field that a configuration declares with `flag`."""
    for module, tree in _library().items():
        if not _within(module, ["mcore.config"]):
            continue
        for cls in ast.walk(tree):
            if not isinstance(cls, ast.ClassDef):
                continue
            for node in cls.body:
                name, value = _assigned(node)
                if isinstance(value, ast.Call) and _chain(value.func) == "flag":
                    yield module, cls.name, name, node.lineno


def _attributes_read(node, *, of_self):
    """Attributes that are read; `self.x` is read of a configuration in its own methods only."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load)
        if of_self or _chain(child.value) != "self"
    }


def _called_by_name(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _looked_up(tree):
    """Options read before the configuration is built: `arguments.get("section", "name")`."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _chain(node.func) == "arguments.get"
        and len(node.args) == 2
        and isinstance(node.args[1], ast.Constant)
    }


def _only_checks(module, function):
    """Whether a function of the configuration says what is wrong, and nothing else."""
    says = function.returns is not None and ast.unparse(function.returns) == "Iterator[str]"
    return says or function.name == "__post_init__" or module == "mcore.config.checks"


def test_every_option_is_read():
    """A field counts as read where code outside the configuration reads an attribute of its name.

    It may do so through a property, method or function of the configuration, but not through its
    checks. An argument or a variable of that name is another thing.
    """
    read, used, derived = set(), set(), []
    for module, (_, tree) in _modules().items():
        if not _within(module, ["mcore.config"]):
            if module != "mcore.training.arguments":
                read |= _attributes_read(tree, of_self=False) | _looked_up(tree)
                used |= _called_by_name(tree)
            continue
        derived += [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and not _only_checks(module, node)
        ]
    while True:
        reached = [node for node in derived if node.name in read | used]
        more = set().union(*(_attributes_read(node, of_self=True) for node in reached))
        calls = set().union(*map(_called_by_name, reached))
        if more <= read and calls <= used:
            break
        read |= more
        used |= calls
    _fail_on(
        f"{module}:{line} {cls}.{name} is read by nothing"
        for module, cls, name, line in _config_fields()
        if name not in read and f"{cls}.{name}" not in SETTLED_EARLY
    )


# --- documentation


def _is_hidden(function):
    is_setter = any("setter" in ast.unparse(d) for d in function.decorator_list)
    return function.name[0] == "_" or is_setter


def _public_definitions():
    for module, tree in _library().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                yield module, node
                if isinstance(node, ast.ClassDef):
                    for child in node.body:
                        if isinstance(child, ast.FunctionDef) and not _is_hidden(child):
                            yield module, child


def test_public_names_are_documented():
    _fail_on(
        f"{module}:{node.lineno} {node.name} has no docstring"
        for module, node in _public_definitions()
        if ast.get_docstring(node) is None
    )


def test_every_module_says_what_it_is_for():
    _fail_on(name for name, (_, tree) in _modules().items() if ast.get_docstring(tree) is None)
