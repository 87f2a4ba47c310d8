extends Node
# The root node of both scenes. It creates the agents, each in its own arena, and the node that sends them actions.
#
#   --agents=N           number of agents
#   --sync=plugin        use the Sync node of Godot RL Agents, from addons/, and not sync.gd
#   --policy=FILE        run without Python: actions come from the policy that `--export` wrote (play.gd)

@export var agent_script: Script
@export var agents := 1

var arguments := {"env_seed": "1"}

func _enter_tree():
	for argument in OS.get_cmdline_args():
		var parts := argument.trim_prefix("--").split("=", true, 1)
		if parts.size() == 2:
			arguments[parts[0]] = parts[1]
	seed(arguments["env_seed"].to_int())  # before the first random number is drawn

func _ready():
	var count: int = arguments.get("agents", str(agents)).to_int()
	if count < 1:
		printerr("ERROR: --agents=%d: there must be at least one" % count)
		get_tree().quit(2)
		return
	var columns := ceili(sqrt(count))
	for i in count:
		var body: Node = agent_script.new()
		body.place = Vector2(i % columns, i / columns)
		body.arguments = arguments
		body.add_child(load("res://agent.gd").new())
		add_child(body)
	agent_script.stage(self, columns)
	var decides := "res://play.gd" if arguments.has("policy") else "res://sync.gd"
	if arguments.get("sync", "") == "plugin":
		decides = "res://addons/godot_rl_agents/sync.gd"
	var node: Node = load(decides).new()
	node.name = "Sync"
	add_child(node)
