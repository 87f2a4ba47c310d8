extends RefCounted
# A trained policy in plain GDScript, for games without .NET. It reads the policy.json that `--export` writes.
#
#   var policy = load("res://policy.gd").new("res://policy.json")
#   set_action(policy.act(get_obs(), get_action_space()))        every action_repeat ticks, as in training

var inputs: Array  # names in get_obs()
var constants := {}
var steps: Array

func _init(path: String):
	var text := FileAccess.get_file_as_string(path)
	var data = JSON.parse_string(text) if text != "" else null
	if not data is Dictionary or not data.has("steps"):
		printerr("ERROR: %s is not a policy.json" % path)
		return
	inputs = data["inputs"]
	steps = data["steps"]
	for name in data["constants"]:
		var value: Array = data["constants"][name]
		var rows: bool = value[0] is Array
		constants[name] = value.map(func(row): return PackedFloat64Array(row)) if rows else PackedFloat64Array(value)

func act(obs: Dictionary, action_space: Dictionary) -> Dictionary:
	var out := run(obs)
	var action := {}
	var at := 0
	for name in action_space:
		var size: int = action_space[name]["size"]
		var part := out.slice(at, at + size)
		at += size
		var discrete: bool = action_space[name]["action_type"] == "discrete"
		action[name] = largest(part) if discrete else Array(part)
	return action

func run(obs: Dictionary) -> PackedFloat64Array:
	var values := constants.duplicate()
	for name in inputs:
		values[name] = PackedFloat64Array(obs[name])
	for step in steps:
		values[step["out"]] = compute(step, step["in"].map(func(name): return values[name]))
	return values["output"]

func compute(step: Dictionary, x: Array) -> PackedFloat64Array:
	var a: PackedFloat64Array = x[0]
	match step["op"]:
		"Gemm": return affine(a, x[1], x[2])
		"Concat":
			var out := PackedFloat64Array()
			for part in x:
				out.append_array(part)
			return out
		"Slice": return a.slice(step["start"], step["end"])
		"ReduceMean": return [sum(a) / a.size()]
		"ArgMax": return [largest(a)]
		"LogSoftmax":
			var top := a[largest(a)]
			var total := sum(each(a, func(v): return exp(v - top)))
			return each(a, func(v): return v - top - log(total))
		"Add": return both(a, x[1], func(v, w): return v + w)
		"Sub": return both(a, x[1], func(v, w): return v - w)
		"Mul": return both(a, x[1], func(v, w): return v * w)
		"Div": return both(a, x[1], func(v, w): return v / w)
		"Pow": return both(a, x[1], func(v, w): return pow(v, w))
		"Equal": return both(a, x[1], func(v, w): return float(v == w))
		"Max": return both(a, x[1], func(v, w): return maxf(v, w))
		"Min": return both(a, x[1], func(v, w): return minf(v, w))
		"Clip": return each(a, func(v): return clampf(v, step["min"], step["max"]))
		"Elu": return each(a, func(v): return v if v > 0 else step["alpha"] * (exp(v) - 1))
		"Relu": return each(a, func(v): return maxf(v, 0))
		"Tanh": return each(a, func(v): return tanh(v))
		"Sigmoid": return each(a, func(v): return 1 / (1 + exp(-v)))
		"Sqrt": return each(a, func(v): return sqrt(v))
	return a  # Cast

func affine(a: PackedFloat64Array, rows: Array, bias: PackedFloat64Array) -> PackedFloat64Array:
	var out := bias.duplicate()
	for i in rows.size():
		var row: PackedFloat64Array = rows[i]
		var total := 0.0
		for j in a.size():
			total += row[j] * a[j]
		out[i] += total
	return out

func each(a: PackedFloat64Array, function: Callable) -> PackedFloat64Array:
	var out := a.duplicate()
	for i in a.size():
		out[i] = function.call(a[i])
	return out

func both(a: PackedFloat64Array, b: PackedFloat64Array, function: Callable) -> PackedFloat64Array:
	var out := PackedFloat64Array()
	for i in maxi(a.size(), b.size()):  # a single number is broadcast
		out.append(function.call(a[i % a.size()], b[i % b.size()]))
	return out

func sum(a: PackedFloat64Array) -> float:
	var total := 0.0
	for v in a:
		total += v
	return total

func largest(a: PackedFloat64Array) -> int:
	var best := 0
	for i in a.size():
		if a[i] > a[best]:
			best = i
	return best
