extends Node
# Runs the policy of --policy=FILE without Python. With --episodes=N the game quits after N episodes and prints their
# mean return. With --check=FILE it prints the policy's action for each observation in that JSON file and quits.

var policy
var agents := []
var repeat: int
var episodes: int
var ticks := 0
var total := {}  # return of the running episode, by agent
var returns := []
var successes := 0

func _ready():
	process_physics_priority = 1000  # after all other nodes
	var arguments: Dictionary = get_parent().arguments
	repeat = arguments.get("action_repeat", "8").to_int()
	episodes = arguments.get("episodes", "0").to_int()
	policy = load("res://policy.gd").new(arguments["policy"])
	agents = get_tree().get_nodes_in_group("AGENT")
	if policy.steps.is_empty():
		get_tree().quit(1)
	elif arguments.has("check"):
		for obs in JSON.parse_string(FileAccess.get_file_as_string(arguments["check"])):
			print("act " + JSON.stringify(policy.act(obs, agents[0].get_action_space()), "", false, true))
		get_tree().quit()

func _physics_process(_delta):
	ticks += 1
	if ticks % repeat != 1 % repeat:
		return
	for agent in agents:
		total[agent] = total.get(agent, 0.0) + agent.get_reward()
		agent.zero_reward()
		if agent.get_done():
			returns.append(total[agent])
			successes += int(agent.get_info().get("is_success", false))
			total[agent] = 0.0
			agent.set_done_false()
		agent.set_action(policy.act(agent.get_obs(), agent.get_action_space()))
	if episodes > 0 and returns.size() >= episodes:
		var mean: float = returns.reduce(func(a, b): return a + b) / returns.size()
		print("%d episodes, mean return %.3f, success %.3f" % [returns.size(), mean, float(successes) / returns.size()])
		get_tree().quit()
