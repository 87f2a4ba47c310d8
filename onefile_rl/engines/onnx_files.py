"""ONNX files that other people may have written: read without opening other files, and run in bounded memory."""

import functools
import stat

from onefile_rl.engines.printing import printable

LARGEST_FILE = 1 << 28  # bytes; the policies of games have a few megabytes
LARGEST_MEMORY = 1 << 30  # bytes that onnxruntime may take for the tensors of all models
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # of operators that onnxruntime itself has
ENDLESS = ("Loop", "Scan")  # no policy needs them, and a run can't interrupt them


def load(path):
    """Return the content of an ONNX file as bytes and as onnx's ModelProto. A ValueError says what is wrong with it."""
    # These are slow to import, and most envs need no policy
    import onnx

    from onefile_rl.engines.files import free_memory

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > min(LARGEST_FILE, free_memory()):
            raise ValueError(f"it has {status.st_size:,} bytes, at most {LARGEST_FILE:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(first_line(error)) from None
    try:
        model = onnx.load_model_from_string(data)
    except Exception:
        model = None
    if model is None or not model.graph.output:
        raise ValueError("it is not an ONNX model, or is incomplete")
    check(model)
    return data, model


def check(model):
    """Refuse a model that has weights in other files, or operators that may not end."""
    graphs = [model.graph, *model.functions]
    while graphs:
        graph = graphs.pop()
        tensors = []
        if hasattr(graph, "initializer"):  # a function has none
            sparse = graph.sparse_initializer
            tensors += [
                *graph.initializer,
                *(part for x in sparse for part in (x.values, x.indices)),
            ]
        for node in graph.node:
            if node.op_type in ENDLESS:
                raise ValueError(f"it has the operator {node.op_type}, which may not end")
            if node.domain not in DOMAINS and not has_function(model, node):
                where = printable(f"{node.op_type} of {node.domain}")[:100]
                raise ValueError(f"it has the operator {where}, which is unknown")
            for attribute in node.attribute:
                graphs += [attribute.g] if attribute.HasField("g") else []
                graphs += attribute.graphs
                tensors += [attribute.t, *attribute.tensors]
                for x in [attribute.sparse_tensor, *attribute.sparse_tensors]:
                    tensors += [x.values, x.indices]
        for tensor in tensors:
            if tensor.data_location == tensor.EXTERNAL or tensor.external_data:
                raise ValueError("its weights are in other files: export it as one file")


def has_function(model, node):
    """Return whether the model itself defines the operator of a node."""
    return any((x.domain, x.name) == (node.domain, node.op_type) for x in model.functions)


@functools.cache
def limit_memory():
    """Limit the memory that sessions of this process share. This is possible once."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    same_as_requested = 1
    settings = {"max_mem": LARGEST_MEMORY, "arena_extend_strategy": same_as_requested}
    defaults = {"initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    ort.create_and_register_allocator(place, ort.OrtArenaCfg(settings | defaults))


def start_session(path, seed=None):
    """Return onnxruntime's session of an ONNX file. A ValueError says what is wrong with it.

    seed: of the random numbers that the model draws
    """
    import onnxruntime

    problem = "onnxruntime can't load it"
    try:
        data, _ = load(path)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from None
    limit_memory()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the networks are small, and threads that wait use a core
    options.add_session_config_entry("session.use_env_allocators", "1")
    onnxruntime.set_default_logger_severity(4)  # errors are raised
    if seed is not None:
        onnxruntime.set_seed(seed)  # for the sessions that are made from now on
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ValueError(f"{problem}: {first_line(error)}") from None


def first_line(error):
    """Return the first line of an exception's message, which may quote the file."""
    return printable((str(error).splitlines() or [type(error).__name__])[0])[:200]
