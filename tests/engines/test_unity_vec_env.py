"""Test UnityVecEnv's interface: spaces, slots, masks, images, statistics, and messages for bad input."""

import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, agent, free_port, listening
from PIL import Image

from onefile_rl.engines.unity import UnityPlayerError
from unity_vec_env import UnityVecEnv

NAME = "Scripted?team=0"


def request(*ids, size=3):
    return {NAME: [agent(i, [np.full(size, i)]) for i in ids]}


def act(envs, value=0.0):
    return envs.step(np.full(envs.action_space.shape, value, envs.action_space.dtype))


# Interface


def test_is_a_gymnasium_vector_env(scripted):
    envs, _ = scripted([request(0, 1, 2)] * 3)
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 3
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    assert envs.single_observation_space.shape == (3,) and envs.single_action_space.shape == (2,)
    obs, infos = envs.reset()
    assert envs.observation_space.contains(obs) and infos["ready"].all()
    obs, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
    assert envs.observation_space.contains(
        obs
    ) and rewards.shape == terminated.shape == truncated.shape == (3,)


def test_vector_sensors_are_concatenated(scripted):
    envs, _ = scripted([{NAME: [agent(0, [[1, 2], [[3, 4], [5, 6]], [7]])]}])
    assert envs.reset()[0].tolist() == [[1, 2, 3, 4, 5, 6, 7]]


def test_observations_are_not_overwritten_by_the_next_step(scripted):
    envs, _ = scripted([request(0), {NAME: [agent(0, [[5, 5, 5]])]}])
    first, _ = envs.reset()
    act(envs)
    assert first.tolist() == [[0, 0, 0]]


def test_only_ready_rows_are_sent(scripted):
    envs, player = scripted([request(0, 1), request(1), request(0)], max_agents=2)
    envs.reset()
    act(envs, 0.5)
    # Slot 0 is not ready, so its row is ignored.
    envs.step(np.array([[np.nan, np.nan], [0.25, 0.75]]))
    sent = [
        [list(a.continuous_actions) for a in reply.agent_actions[NAME].value]
        for reply in player.replies
    ]
    assert sent == [[[0.5, 0.5], [0.5, 0.5]], [[0.25, 0.75]]]


def test_group_reward_counts(scripted):
    envs, _ = scripted([request(0), {NAME: [agent(0, [[0, 0, 0]], reward=1.0, group_reward=0.5)]}])
    envs.reset()
    assert act(envs)[1][0] == 1.5


def test_discrete_branches_and_masks(scripted):
    mask = [False, True, False, True, False]  # Unity: True is forbidden
    script = [{NAME: [agent(0, [[0]], mask=mask)]}, {NAME: [agent(0, [[0]])]}]
    envs, player = scripted(script, specs={NAME: (0, (3, 2))})
    assert envs.single_action_space == gym.spaces.MultiDiscrete([3, 2])
    _, infos = envs.reset()
    assert infos["action_mask"].tolist() == [[True, False, True, False, True]]
    infos = envs.step(np.array([[2, 1]]))[4]
    assert infos["action_mask"].all()
    assert list(player.replies[0].agent_actions[NAME].value[0].discrete_actions) == [2, 1]
    with pytest.raises(ValueError, match="below the branch sizes"):
        envs.step(np.array([[3, 0]]))


def test_hybrid_actions(scripted):
    envs, player = scripted([{NAME: [agent(0, [[0]])]}] * 2, specs={NAME: (2, (4,))})
    assert set(envs.single_action_space.spaces) == {"continuous", "discrete"}
    envs.reset()
    envs.step({"continuous": np.array([[0.5, -0.5]]), "discrete": np.array([[3]])})
    sent = player.replies[0].agent_actions[NAME].value[0]
    assert (list(sent.continuous_actions), list(sent.discrete_actions)) == ([0.5, -0.5], [3])


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_images_are_uint8_height_width_channel(scripted):
    rng = np.random.default_rng(0)
    rgb, grey = rng.integers(0, 256, (4, 6, 3), np.uint8), rng.integers(0, 256, (4, 6), np.uint8)
    same = np.repeat(grey[:, :, None], 3, 2)
    other = np.repeat(grey[::-1, :, None], 3, 2)
    compressed = lambda data: dict(compression_type=1, compressed_data=data)
    raw = lambda pixels: dict(float_data=dict(data=(pixels / 255).ravel().tolist()))
    last, first, stack = [2, 2, 1], [1, 2, 2], dict(compressed_channel_mapping=[0, 0, 0, 1, 1, 1])
    info = agent(0, [[7.0]])
    info["observations"] += [
        dict(name="Color", shape=(4, 6, 3), **compressed(png(rgb)), dimension_properties=last),
        dict(
            name="ChannelsFirst",
            shape=(3, 4, 6),
            **compressed(png(rgb)),
            dimension_properties=first,
        ),
        dict(name="Grey", shape=(4, 6, 1), **compressed(png(same)), dimension_properties=last),
        dict(
            name="Stack",
            shape=(4, 6, 2),
            **compressed(png(same) + png(other)),
            **stack,
            dimension_properties=last,
        ),
        dict(name="Raw", shape=(4, 6, 3), **raw(rgb), dimension_properties=last),
        dict(
            name="RawFirst",
            shape=(3, 4, 6),
            **raw(rgb.transpose(2, 0, 1)),
            dimension_properties=first,
        ),
    ]
    envs, _ = scripted([{NAME: [info]}])
    obs, _ = envs.reset()
    assert envs.observation_space.contains(obs) and obs["vector"].tolist() == [[7.0]]
    for key in ("Color", "ChannelsFirst", "Raw", "RawFirst"):
        np.testing.assert_array_equal(obs[key][0], rgb)
    np.testing.assert_array_equal(obs["Grey"][0], grey[:, :, None])
    np.testing.assert_array_equal(obs["Stack"][0], np.stack([grey, grey[::-1]], 2))


def raw_image(pixels, properties):
    """An uncompressed image. The declared order of its dimensions is that of `pixels`."""
    data = dict(data=(np.ravel(pixels) / 255).tolist())
    info = agent(0, [])
    sensor = dict(name="Camera", float_data=data, dimension_properties=properties)
    if properties == [1, 2, 2]:
        sensor["shape"] = (pixels.shape[2], *pixels.shape[:2])
    else:
        sensor["shape"] = pixels.shape
    info["observations"] = [sensor]
    return info


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
# What a player sends: the package, the order of the floats, the option; then the words of the notice
ORDERS = [
    ("3.0.0-exp.1", "last", "auto", "(height, width, channels), the order in which this version"),
    ("3.0.0", "last", "auto", "Camera: uncompressed images of ML-Agents' package 3.0.0 are read"),
    ("4.0.0", "last", "auto", "(height, width, channels), the order in which this version"),
    ("4.0.3", "first", "auto", "--save-images FOLDER; if it is scrambled, give --image-order"),
    ("", "first", "auto", "of an unknown version are read as (channels, height, width)"),
    ("4.0.3", "last", "channels-last", None),
    ("3.0.0", "first", "channels-first", None),
]


@pytest.mark.parametrize(("package", "order", "option", "notice"), ORDERS)
def test_the_order_of_raw_images_follows_the_package_or_the_option(
    scripted, capsys, package, order, option, notice
):
    """Packages 3.0 and 4.0.0 declare channels first and send the floats with the channels last."""
    info = raw_image(PIXELS, [1, 2, 2])
    if order == "first":
        floats = PIXELS.transpose(2, 0, 1).ravel() / 255
        info["observations"][0]["float_data"]["data"] = floats.tolist()
    settings = dict(image_order=option)
    envs, _ = scripted([{NAME: [info]}], package=package, settings=settings)
    np.testing.assert_array_equal(envs.reset()[0]["Camera"][0], PIXELS)
    out = capsys.readouterr().out
    assert notice in out if notice else "uncompressed" not in out
    if notice:
        other = "channels-first" if order == "last" else "channels-last"
        assert f"--save-images FOLDER; if it is scrambled, give --image-order {other}" in out


@pytest.mark.parametrize("option", ["auto", "channels-first"])
def test_images_that_are_declared_with_channels_last_need_no_option(scripted, capsys, option):
    info = raw_image(PIXELS, [2, 2, 1])
    envs, _ = scripted([{NAME: [info]}], package="2.2.1", settings=dict(image_order=option))
    np.testing.assert_array_equal(envs.reset()[0]["Camera"][0], PIXELS)
    assert "uncompressed" not in capsys.readouterr().out


def test_grey_images_have_no_order(scripted, capsys):
    info = raw_image(PIXELS[:, :, :1], [1, 2, 2])
    envs, _ = scripted([{NAME: [info]}], package="4.0.3")
    np.testing.assert_array_equal(envs.reset()[0]["Camera"][0], PIXELS[:, :, :1])
    assert "uncompressed" not in capsys.readouterr().out


def test_an_unknown_image_order_is_one_line():
    refuses("--image-order rows: choose one of auto, channels-first", "Mixed", image_order="rows")


def test_save_images_writes_what_was_read(tmp_path):
    from unity_vec_env import main

    main("GridWorld", steps=1, save_images=str(tmp_path / "new"))
    (path,) = (tmp_path / "new").iterdir()
    with closing(UnityVecEnv("GridWorld")) as envs:
        obs, _ = envs.reset()
        (name,) = envs.layout.images
    np.testing.assert_array_equal(np.asarray(Image.open(path)), obs[name][0])
    with pytest.raises(SystemExit, match="the agents have no images"):
        main("Basic", steps=1, save_images=str(tmp_path))


def test_statistics_come_out_in_infos(scripted):
    def stat(key, value, method):
        payload = struct.pack("<i", len(key)) + key.encode() + struct.pack("<fi", value, method)
        return (
            uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520").bytes_le
            + struct.pack("<i", len(payload))
            + payload
        )

    data = stat("mean", 1, 0) + stat("mean", 4, 0) + stat("last", 1, 1) + stat("last", 9, 1)
    data += stat("sum", 2, 2) + stat("sum", 3, 2)
    envs, _ = scripted([request(0)] * 2, side_channel=data)
    assert envs.reset()[1]["stats"] == {"mean": 2.5, "last": 9, "sum": 5}
    assert "stats" not in act(envs)[4]


def test_agents_keep_their_slots(scripted):
    gone, dead = (agent(number, [np.ones(3)], done=True) for number in (1, 7))
    script = [
        request(0, 1, 2),
        {NAME: [gone, *request(2, 0)[NAME]]},
        request(0, 2, 7),
        {NAME: [dead, *request(7, 0, 2)[NAME]]},
    ]
    envs, _ = scripted(script)
    envs.reset()
    obs, *_, infos = act(envs)
    assert infos["ready"].tolist() == [True, False, True]
    obs, *_, infos = act(envs)
    assert obs[:, 0].tolist() == [0, 7, 2] and infos["ready"].all(), (
        "agent 7 gets the slot of agent 1, which ended"
    )
    obs, _, terminated, _, infos = act(envs)
    assert obs[:, 0].tolist() == [0, 7, 2] and terminated.tolist() == [False, True, False]


def test_agents_of_other_behaviors_act_at_random_with_a_notice(scripted, capsys):
    other = [agent(9, [[0.0]], mask=[True, False, True]), agent(8, [[0.0]])]
    script = [{NAME: request(0)[NAME], "Other?team=1": other}] * 3
    envs, player = scripted(
        script, behavior="Scripted", specs={NAME: (2, ()), "Other?team=1": (1, (3,))}
    )
    envs.reset()
    act(envs), act(envs)
    assert "agents of Other?team=1 act at random" in capsys.readouterr().out
    first, second = player.replies[0].agent_actions["Other?team=1"].value
    assert list(first.discrete_actions) == [1] and -1 <= first.continuous_actions[0] <= 1
    assert (
        first.continuous_actions
        != player.replies[1].agent_actions["Other?team=1"].value[0].continuous_actions
    )


def test_a_message_with_only_an_end_is_answered_without_actions(scripted):
    envs, player = scripted(
        [request(0), {NAME: [agent(0, [[4, 4, 4]], -1.0, done=True)]}, request(0)]
    )
    envs.reset()
    obs, rewards, terminated, truncated, infos = act(envs)
    assert (rewards[0], terminated[0], truncated[0], infos["ready"][0]) == (-1, True, False, True)
    assert infos["final_obs"][0].tolist() == [4, 4, 4] and obs[0].tolist() == [0, 0, 0]
    assert (
        infos["final_info"]["episode"]["r"][0] == -1 and infos["final_info"]["episode"]["l"][0] == 1
    )
    assert not player.replies[1].agent_actions, "no agent requested a decision"


def test_seed_reaches_the_player(scripted):
    envs, player = scripted([request(0)])
    assert player.greeting.seed == 0
    with pytest.raises(
        ValueError, match="the seed is set when the players start, use UnityVecEnv\\(..., seed=5\\)"
    ):
        envs.reset(seed=5)


def test_time_scale_reaches_the_player(scripted):
    _, player = scripted([request(0)])
    engine = uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7").bytes_le
    assert engine + struct.pack("<iif", 8, 2, 20.0) in player.first.side_channel


def test_parameters_and_arguments_reach_the_player():
    with closing(
        UnityVecEnv("3DBall", parameters={"scale": 2.0}, player_args=["--agents", "1"])
    ) as envs:
        falls = []
        obs, _ = envs.reset()
        for _ in range(12):
            obs, *_ = envs.step(np.zeros((1, 2)))
            falls.append(obs[0, 3])
    assert min(falls) > 3.2, "a ball of twice the size rests half a metre higher on its platform"


# Bad input: an error of one line, and no process is left


def script_file(tmp_path, text, mode=0o755):
    path = tmp_path / "Game.x86_64"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def children():
    out = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    ).stdout
    return [line for line in out.splitlines() if "ps --ppid" not in line and "defunct" not in line]


def refuses(match, *args, **kwargs):
    before = children()
    with pytest.raises((UnityPlayerError, ValueError), match=match) as caught:
        UnityVecEnv(*args, **kwargs)
    assert "\n" not in str(caught.value)
    assert children() == before, "a process is left"


def test_path_that_does_not_exist():
    refuses("nowhere/Game: no player found, there is no such file or folder", "nowhere/Game")
    refuses("NoScene: no player found. .*Bundled scenes: 3DBall, Basic, Crawler", "NoScene")
    refuses("Did you mean Crawler", "Crawlr")


def test_path_that_is_not_executable(tmp_path):
    refuses("not executable: run chmod", script_file(tmp_path, "", mode=0o644))
    refuses("cannot be started", script_file(tmp_path, "neither a program nor a script"))


def test_build_is_found_without_its_suffix(tmp_path):
    script_file(tmp_path, "#!/bin/sh\nexit 3\n")
    refuses("exit code 3", str(tmp_path / "Game"))
    refuses("exit code 3", str(tmp_path))


def test_player_that_exits_at_once(tmp_path):
    start = time.monotonic()
    path = script_file(tmp_path, "#!/bin/sh\necho it hurts >&2\nexit 3\n")
    refuses("player 0 .* ended with exit code 3: it hurts", path)
    assert time.monotonic() - start < 30, "not only after the timeout"


def test_player_that_never_connects(tmp_path):
    path = script_file(tmp_path, "#!/bin/sh\nexec sleep 60\n")
    refuses("has not connected to port .* within 0.3 s", path, timeout=0.3)


def test_player_of_another_protocol(scripted):
    with pytest.raises(
        UnityPlayerError, match="speaks ML-Agents protocol 2.0.0, but 1.3 to 1.x is needed"
    ):
        scripted([request(0)], version="2.0.0")


def test_a_player_that_does_not_speak_grpc(tmp_path):
    text = f"""#!{sys.executable}
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[-1])))
s.sendall(b'GET / HTTP/1.1\\r\\nHost: here\\r\\n\\r\\n')
s.recv(9)
"""
    refuses("failed to connect: the peer does not speak gRPC", script_file(tmp_path, text))


def test_busy_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refuses(f"port {port} is in use", "Mixed", base_port=port)


def test_unknown_behavior_lists_the_existing_ones(scripted):
    with pytest.raises(UnityPlayerError, match="no agent of behavior Unknown .*it has Scripted"):
        scripted([request(0)] * 300, behavior="Unknown")


def test_agents_of_the_behavior_may_appear_late(scripted):
    other = {"Other?team=1": [agent(1, [[0.0]])]}
    specs = {NAME: (2, ()), "Other?team=1": (1, ())}
    envs, player = scripted([other] * 50 + [request(0)], behavior="Scripted", specs=specs)
    assert envs.reset()[1]["ready"].tolist() == [True] and len(player.replies) == 50


def test_several_behaviors_and_none_chosen(scripted):
    script = [{NAME: request(0)[NAME], "Other?team=1": [agent(1, [[0.0]])]}]
    with pytest.raises(
        UnityPlayerError, match="choose one with --behavior: Other.team=1, Scripted.team=0"
    ):
        scripted(script, specs={NAME: (2, ()), "Other?team=1": (1, ())})


def test_no_agents_at_all(scripted):
    with pytest.raises(UnityPlayerError, match="it has no agents at all"):
        scripted([{}] * 300)
    refuses("exit code 2: .*--agents must be at least 1", "Mixed", player_args=["--agents", "0"])
    refuses("--max-agents 0", "Mixed", max_agents=0)
    refuses("--num-players 0", "Mixed", num_players=0)


def test_more_agents_than_slots(scripted):
    envs, _ = scripted([request(0, 1), request(0, 1, 2)])
    envs.reset()
    with pytest.raises(
        UnityPlayerError, match="more agents than its 2 slots: set a larger --max-agents"
    ):
        act(envs)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_bad_observation_names_agent_and_sensor(scripted, value):
    envs, _ = scripted(
        [{NAME: [agent(4, [[0, 0], [1, 1]])]}, {NAME: [agent(4, [[0, 0], [1, value]])]}]
    )
    envs.reset()
    with pytest.raises(
        UnityPlayerError,
        match=re.escape(f"agent 4, sensor Body1: observation 3 is {np.float32(value)}"),
    ):
        act(envs)


def test_observation_of_another_size(scripted):
    envs, _ = scripted([request(0), request(0, size=4)])
    envs.reset()
    with pytest.raises(
        UnityPlayerError, match="agents .0.: a sensor sends another number of values"
    ):
        act(envs)


@pytest.mark.parametrize(("value", "match"), [(np.nan, "nan"), (1e35, "1.*e.35, and must be at")])
@pytest.mark.parametrize("done", [False, True])
def test_bad_reward(scripted, value, match, done):
    last = {NAME: [agent(0, [[0, 0, 0]], reward=value, done=done)]}
    envs, _ = scripted([request(0), last])
    envs.reset()
    with pytest.raises(UnityPlayerError, match=f"agent 0: its reward is {match}"):
        act(envs)


def test_bad_actions(scripted):
    envs, _ = scripted([request(0, 1)] * 3)
    envs.reset()
    with pytest.raises(ValueError, match=r"shape \(2, 3\), not \(2, 2\)"):
        envs.step(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="action of slot 1 is not finite"):
        envs.step(np.array([[0, 0], [0, np.nan]]))
    assert act(envs)[4]["ready"].all(), "the env still works, because nothing was sent"


def test_a_player_that_quits_is_an_error(scripted):
    envs, _ = scripted([request(0)])
    envs.reset()
    with pytest.raises(UnityPlayerError, match="has quit"):
        act(envs)
    for again in (lambda: act(envs), envs.step_wait, envs.reset):
        with pytest.raises(UnityPlayerError, match="the env is closed"):
            again()


# No process and no port is left


def test_dead_player_is_noticed_at_once():
    envs = UnityVecEnv("Mixed", max_agents=16)
    envs.reset()
    process = envs.players[0].process
    process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(UnityPlayerError, match="ended with exit code -9"):
        while True:
            act(envs)
    assert time.monotonic() - start < 30, "not only after the timeout"


@pytest.mark.parametrize("num_players", [1, 2])
def test_hung_player_times_out(num_players):
    envs = UnityVecEnv("Mixed", max_agents=16, num_players=num_players)
    envs.reset()
    envs.timeout = envs.players[-1].timeout = 0.5
    process = envs.players[-1].process
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(UnityPlayerError, match="has not answered for 0.5 s"):
            act(envs)
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_listens_on_loopback_only_and_no_longer_than_needed():
    from onefile_rl.engines.unity import Player

    before = listening()
    player = Player("Mixed", 0, None, 10, [])
    (address,) = listening() - before
    assert address == f"0100007F:{player.port:04X}", "127.0.0.1 and nothing else"
    player.handshake()
    assert listening() == before, "the port is closed once the player is connected"
    player.close()


def test_close_leaves_no_process_and_no_port():
    before = children()
    envs = UnityVecEnv("Mixed", num_players=2, max_agents=16)
    envs.reset()
    assert len(children()) == len(before) + 2
    envs.close()
    envs.close()
    assert children() == before


ENDS = [
    "raise RuntimeError",
    "raise SystemExit(3)",
    "pass",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "del envs",
]


@pytest.mark.parametrize("how", ENDS)
def test_players_end_with_their_client(how):
    code = f"""
import os, signal, sys
from unity_vec_env import UnityVecEnv
envs = UnityVecEnv("Mixed", num_players=2, max_agents=16)
envs.reset()
print(*(p.process.pid for p in envs.players), flush=True)
{how}
"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    ).stdout
    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_demo_prints_errors_in_one_line():
    command = [sys.executable, "unity_vec_env.py", "--path", "nowhere"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (
        out.returncode == 1
        and out.stderr.startswith("nowhere: no player found")
        and out.stderr.count("\n") == 1
    )


def test_editor_is_waited_for(scripted, capsys):
    scripted([request(0)])
    assert "Waiting for Play in the Unity editor" in capsys.readouterr().out
    refuses("has not connected", "editor", base_port=free_port(), timeout=0.2)


def test_help_describes_every_option():
    """Also how to find out the order of uncompressed images."""
    command = [sys.executable, "unity_vec_env.py", "--help"]
    environment = os.environ | {"COLUMNS": "1000"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = " ".join(out.stdout.replace("│", " ").split())
    assert "look at an image with --save-images, and choose another order if it is" in text
    assert "--run {None}|STR folder of a run, for --check" in text
    assert "Args:" not in text


@pytest.mark.parametrize(
    ("scene", "lines"),
    [
        ("Basic", ["Basic?team=0: 1 agent", "All agents request a decision in every step"]),
        ("MixedHybrid", ["Decision periods differ or slots are free: "]),
    ],
)
def test_the_program_says_who_decides_when(scene, lines, capsys):
    from unity_vec_env import main

    main(scene, steps=20, max_agents=None if scene == "Basic" else 16)
    printed = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(text.startswith(line) for text in printed), printed
