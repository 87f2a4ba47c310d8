extends Node
# Receives actions from Python by the protocol of Godot RL Agents 0.7: JSON messages with a length prefix over TCP.

var arguments: Dictionary
var agents := []
var peer := StreamPeerTCP.new()
var ticks := 0  # until the next decision
var owed := ""  # the message that Python waits for

func _ready():
	process_physics_priority = 1000  # after all other nodes
	arguments = get_parent().arguments
	var speedup: float = arguments.get("speedup", "1").to_float()
	Engine.physics_ticks_per_second = roundi(60 * speedup)
	Engine.time_scale = speedup
	agents = get_tree().get_nodes_in_group("AGENT")
	for i in 50:  # the client of Godot RL Agents listens only after it has started the game
		peer.connect_to_host("127.0.0.1", arguments.get("port", "11008").to_int())
		while peer.get_status() == StreamPeerTCP.STATUS_CONNECTING:
			OS.delay_usec(100)
			peer.poll()
		if peer.get_status() == StreamPeerTCP.STATUS_CONNECTED:
			break
		peer.disconnect_from_host()
		OS.delay_msec(100)
	if peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		printerr("ERROR: no connection to port " + arguments.get("port", "11008"))
		get_tree().quit(1)
		return
	peer.set_no_delay(true)

func _physics_process(_delta):
	ticks -= 1
	if ticks > 0:
		return
	if owed == "reset":
		send({"type": "reset", "obs": ask("get_obs"), "info": ask("get_info")})
	elif owed == "step":
		send({"type": "step", "obs": ask("get_obs"), "info": ask("get_info"), "reward": ask("get_reward"), "done": ask("get_done")})
		ask("zero_reward")
		ask("set_done_false")
	owed = ""
	while owed == "":
		var message = receive()
		if message == null:
			get_tree().quit()
			return
		answer(message)

func answer(message: Dictionary):
	match message["type"]:
		"env_info":
			send({"type": "env_info", "n_agents": agents.size(), "observation_space": ask("get_obs_space"),
				"action_space": ask("get_action_space"), "agent_policy_names": agents.map(func(agent): return agent.policy_name)})
		"call":
			send({"type": "call", "returns": ask(message["method"])})
		"reset":
			for agent in agents:
				agent.needs_reset = true
			owed = "reset"
			ticks = 1
		"action":
			for i in agents.size():
				agents[i].set_action(message["action"][i])
			owed = "step"
			ticks = arguments.get("action_repeat", "8").to_int()

func ask(method: String) -> Array:
	return agents.map(func(agent): return agent.call(method))

func send(message: Dictionary):
	peer.put_string(JSON.stringify(message, "", false))

func receive():
	# Returns null when Python closes the connection or sends "close".
	var since := Time.get_ticks_usec()
	while peer.get_available_bytes() == 0:
		peer.poll()
		if peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			return null
		OS.delay_usec(clampi((Time.get_ticks_usec() - since) / 20, 10, 1000))  # at most 5 % late, and rarely polled
	var message = JSON.parse_string(peer.get_string())
	return null if message == null or message["type"] == "close" else message
