extends RigidBody2D
# A disc that two forces push to its target. An episode ends at the target (+1), outside of the arena (-1), or after 26
# seconds.

const HALF := 400.0  # half of an arena's side
const FORCE := 600.0
const TICKS := 1600

var place: Vector2  # column and row of the arena
var arguments: Dictionary
var home: Vector2
var target: Vector2
var push: Vector2
var distance := 0.0
var age := 0

@onready var agent := get_child(0)
@onready var seen := DisplayServer.get_name() != "headless"

static func stage(main: Node, columns: int):
	var camera := Camera2D.new()
	camera.position = Vector2.ONE * (columns - 1) * 1.25 * HALF
	camera.zoom = Vector2.ONE * 640 / (columns * 2.5 * HALF)
	main.add_child(camera)

func _ready():
	home = place * 2.5 * HALF
	can_sleep = false
	linear_damp = 1.0
	var shape := CollisionShape2D.new()
	shape.shape = CircleShape2D.new()
	shape.shape.radius = 30.0
	add_child(shape)
	restart()

func somewhere() -> Vector2:
	return home + Vector2(randf_range(-1, 1), randf_range(-1, 1)) * 0.8 * HALF

func restart():
	target = somewhere()
	position = somewhere()
	linear_velocity = Vector2.ZERO
	# The physics server has its own position, which would overwrite the node's.
	PhysicsServer2D.body_set_state(get_rid(), PhysicsServer2D.BODY_STATE_TRANSFORM, Transform2D(0, position))
	push = Vector2.ZERO
	constant_force = Vector2.ZERO
	distance = position.distance_to(target)
	age = 0

func act(action: Dictionary):
	push = Vector2(clampf(action["push"][0], -1, 1), clampf(action["push"][1], -1, 1))
	constant_force = push * FORCE  # takes effect in the next tick

func _physics_process(_delta):
	if seen:
		queue_redraw()
	if agent.waiting:
		return
	age += 1
	var now := position.distance_to(target)
	agent.reward += (distance - now) / HALF
	distance = now
	var off := (position - home).abs()
	if now < 40.0:
		agent.finish(1.0)
	elif maxf(off.x, off.y) > HALF:
		agent.finish(-1.0)
	elif age >= TICKS:
		agent.finish(0.0, true)

func observe() -> Dictionary:
	var here := (position - home) / HALF
	var way := (target - position) / HALF
	return {"obs": [here.x, here.y, way.x, way.y, linear_velocity.x / 300, linear_velocity.y / 300]}

func spaces() -> Dictionary:
	return {"obs": {"size": [6], "space": "box"}}

func actions() -> Dictionary:
	return {"push": {"size": 2, "action_type": "continuous"}}

func _draw():
	draw_set_transform(-position)
	draw_rect(Rect2(home - Vector2.ONE * HALF, Vector2.ONE * 2 * HALF), Color.WHITE)
	draw_circle(target, 40.0, Color(0.45, 0.75, 0.45))
	draw_circle(position, 30.0, Color(0.25, 0.4, 0.75))
	draw_line(position, position + push * 100, Color(0.85, 0.35, 0.2), 12.0)
