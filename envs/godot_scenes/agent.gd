extends Node
# The agent of its parent node, a body. Methods and names are those of AIController in the Godot RL Agents plugin, so
# that both the plugin's Sync node and sync.gd work with it.
#
# A body has observe(), spaces(), actions(), act(action), restart(), and optionally mask(). It calls finish() at the end
# of an episode and does nothing while `waiting` is true: the ticks between an end and the next decision belong to no
# episode.

enum ControlModes { INHERIT_FROM_SYNC, HUMAN, TRAINING, ONNX_INFERENCE, RECORD_EXPERT_DEMOS }

var control_mode := ControlModes.INHERIT_FROM_SYNC
var policy_name := "shared_policy"
var heuristic := "human"
var needs_reset := false
var waiting := true
var reward := 0.0
var done := false
var end := {}  # get_info() of the last end

@onready var body := get_parent()

func _ready():
	add_to_group("AGENT")

func _physics_process(_delta):
	if needs_reset:
		needs_reset = false
		reward = 0.0
		done = false
		waiting = true
		body.restart()

func finish(bonus: float, truncated := false):
	reward += bonus
	done = true
	waiting = true
	end = {"terminal_observation": body.observe(), "TimeLimit.truncated": truncated, "is_success": bonus > 0}
	body.restart()

func get_info() -> Dictionary:
	var info := end.duplicate() if done else {}
	if body.has_method("mask"):
		info["action_mask"] = body.mask()
	return info

func set_action(action: Dictionary):
	waiting = false
	body.act(action)

func get_obs() -> Dictionary:
	return body.observe()

func get_obs_space() -> Dictionary:
	return body.spaces()

func get_action_space() -> Dictionary:
	return body.actions()

func get_reward() -> float:
	return reward

func zero_reward():
	reward = 0.0

func get_done() -> bool:
	return done

func set_done_false():
	done = false

func set_heuristic(how: String):
	heuristic = how
