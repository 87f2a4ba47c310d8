extends CharacterBody3D
# A rover that drives to a beacon among pillars. It has two discrete branches: left, straight, right; and brake, go,
# boost. The action mask forbids boost while the battery is low. An episode ends at the beacon (+1), at an obstacle (-1),
# or after 20 seconds.
#
#   --camera=SIZE        also observe an image "camera_2d" of SIZE x SIZE pixels; needs a display

const HALF := 5.0  # metres, half of an arena's side
const SPEEDS := [0.0, 2.5, 5.0]
const TURN := 2.5  # radians per second
const RAYS := 9  # in the half circle ahead
const SIGHT := 4.0
const TICKS := 1200

static var seeing: Array = []  # rovers with cameras
static var moves := 0  # counts the moves of all rovers
static var drawn_at := -1  # value of `moves` when the cameras last rendered

var place: Vector2  # column and row of the arena
var arguments: Dictionary
var home: Vector3
var beacon := Vector3.ZERO
var pillars: Array[StaticBody3D] = []
var marker: MeshInstance3D
var viewport: SubViewport
var steer := 1
var drive := 0
var speed := 0.0
var battery := 1.0
var distance := 0.0
var age := 0

@onready var agent := get_child(0)

static func stage(main: Node, columns: int):
	var light := DirectionalLight3D.new()
	light.rotation = Vector3(-1.0, 0.5, 0)
	main.add_child(light)
	var world := WorldEnvironment.new()
	world.environment = Environment.new()
	world.environment.background_mode = Environment.BG_COLOR
	world.environment.background_color = Color(0.75, 0.85, 0.95)
	world.environment.ambient_light_source = Environment.AMBIENT_SOURCE_COLOR
	world.environment.ambient_light_color = Color.WHITE
	world.environment.ambient_light_energy = 0.4
	main.add_child(world)
	var camera := Camera3D.new()
	var middle := (columns - 1) * 1.2 * HALF
	camera.position = Vector3(middle, columns * 12.0, middle + columns * 7.0)
	main.add_child(camera)
	camera.look_at(Vector3(middle, 0, middle))

func _ready():
	home = Vector3(place.x, 0, place.y) * 2.4 * HALF
	add_child(shaped(BoxShape3D.new(), Vector3(0.5, 0.4, 0.7)))
	add_child(drawn(BoxMesh.new(), Vector3(0.5, 0.4, 0.7), Color(0.25, 0.4, 0.75)))
	for i in 4:  # walls
		var across := Vector3(2 * HALF, 1, 0.2) if i < 2 else Vector3(0.2, 1, 2 * HALF)
		obstacle(across, Color(0.6, 0.6, 0.65)).position = home + [Vector3.FORWARD, Vector3.BACK, Vector3.LEFT, Vector3.RIGHT][i] * HALF
	for i in 5:
		pillars.append(obstacle(Vector3(0.8, 1, 0.8), Color(0.8, 0.5, 0.3)))
	var ground := drawn(PlaneMesh.new(), Vector3(HALF, 1, HALF), Color(0.9, 0.9, 0.88))
	ground.position = home + Vector3.DOWN * 0.25
	get_parent().add_child.call_deferred(ground)
	marker = drawn(SphereMesh.new(), Vector3.ONE * 0.8, Color(0.2, 0.75, 0.3))
	get_parent().add_child.call_deferred(marker)
	if arguments.has("camera"):
		look()
	restart()

func shaped(shape: BoxShape3D, size: Vector3) -> CollisionShape3D:
	var node := CollisionShape3D.new()
	shape.size = size
	node.shape = shape
	return node

func drawn(mesh: PrimitiveMesh, size: Vector3, color: Color) -> MeshInstance3D:
	var node := MeshInstance3D.new()
	node.mesh = mesh
	node.scale = size
	mesh.material = StandardMaterial3D.new()
	mesh.material.albedo_color = color
	return node

func obstacle(size: Vector3, color: Color) -> StaticBody3D:
	var node := StaticBody3D.new()
	node.add_child(shaped(BoxShape3D.new(), size))
	node.add_child(drawn(BoxMesh.new(), size, color))
	get_parent().add_child.call_deferred(node)
	return node

func look():
	viewport = SubViewport.new()
	viewport.size = Vector2i.ONE * arguments["camera"].to_int()
	viewport.add_child(Camera3D.new())
	add_child(viewport)
	seeing.append(self)
	get_tree().root.disable_3d = not RenderingServer.render_loop_enabled  # without a render loop, the view from above is not shown

func somewhere(margin: float) -> Vector3:
	return home + Vector3(randf_range(-1, 1), 0, randf_range(-1, 1)) * (HALF - margin)

func restart():
	moves += 1
	for pillar in pillars:
		pillar.position = somewhere(1.0)
	position = somewhere(1.0)
	while crowded(position):
		position = somewhere(1.0)
	beacon = somewhere(0.8)
	while crowded(beacon) or beacon.distance_to(position) < 2.0:
		beacon = somewhere(0.8)
	marker.position = beacon
	rotation.y = randf_range(-PI, PI)
	speed = 0.0
	steer = 1
	drive = 0
	battery = 1.0
	age = 0
	distance = position.distance_to(beacon)

func crowded(spot: Vector3) -> bool:
	return pillars.any(func(pillar): return pillar.position.distance_to(spot) < 1.3)

func act(action: Dictionary):
	steer = int(action["steer"])
	drive = int(action["drive"])
	if drive == 2 and not mask()[5]:  # the policy may ignore the mask
		drive = 1

func mask() -> Array:
	return [1, 1, 1, 1, 1, int(battery > 0.25)]

func _physics_process(delta):
	if agent.waiting:
		return
	age += 1
	moves += 1
	battery = clampf(battery + (-0.5 if drive == 2 else 0.25) * delta, 0, 1)
	speed = move_toward(speed, SPEEDS[drive], 8 * delta)
	rotation.y += (1 - steer) * TURN * delta
	var hit := move_and_collide(-basis.z * speed * delta)
	var now := position.distance_to(beacon)
	agent.reward += (distance - now) / HALF
	distance = now
	if now < 0.6:
		agent.finish(1.0)
	elif hit != null:
		agent.finish(-1.0)
	elif age >= TICKS:
		agent.finish(0.0, true)

func observe() -> Dictionary:
	var seen := []
	var space := get_world_3d().direct_space_state
	for i in RAYS:
		var way := -basis.z.rotated(Vector3.UP, PI * (0.5 - float(i) / (RAYS - 1)))
		var ray := space.intersect_ray(PhysicsRayQueryParameters3D.create(position, position + way * SIGHT, 1, [get_rid()]))
		seen.append(1.0 if ray.is_empty() else position.distance_to(ray["position"]) / SIGHT)
	var way := beacon - position
	var angle := atan2(-basis.z.cross(way).y, -basis.z.dot(way))
	seen.append_array([sin(angle), cos(angle), way.length() / HALF, speed / SPEEDS[2], battery])
	var out := {"obs": seen}
	if viewport != null:
		out["camera_2d"] = picture()
	return out

func picture() -> String:
	if drawn_at != moves:  # render the current state, not that of the last frame; all cameras at once
		drawn_at = moves
		for rover in seeing:
			rover.viewport.get_camera_3d().global_transform = rover.global_transform.translated_local(Vector3(0, 0.3, -0.4))
			rover.viewport.render_target_update_mode = SubViewport.UPDATE_ONCE
		for node in get_parent().find_children("*", "Node3D", true, false):
			node.force_update_transform()  # otherwise transforms are updated in the next frame
		RenderingServer.force_draw(false)
	var image := viewport.get_texture().get_image()
	if image == null:
		return ""
	image.convert(Image.FORMAT_RGB8)
	return image.get_data().hex_encode()

func spaces() -> Dictionary:
	var out := {"obs": {"size": [RAYS + 5], "space": "box"}}
	if arguments.has("camera"):
		var size: int = arguments["camera"].to_int()
		out["camera_2d"] = {"size": [3, size, size], "space": "box"}
	return out

func actions() -> Dictionary:
	return {"steer": {"size": 3, "action_type": "discrete"}, "drive": {"size": 3, "action_type": "discrete"}}
