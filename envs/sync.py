"""Gymnasium envs that are stepped one after another, as a vector env whose running episodes survive a resume."""

import gymnasium as gym
import numpy as np

from envs import attributes, contract
from envs import parameters as env_parameters
from envs.hybrid import HybridSpace
from envs.rendering import NEEDS_GL, choose_gl, disable_expensive_rendering, video_writer
from onefile_rl.engines.limits import SAFE_SQUARES, describe, find_invalid
from onefile_rl.engines.samplers import parse
from onefile_rl.engines.scenes import EngineError, derive_seed

MAX_REPLAY_STEPS = 100_000  # longer episodes are not kept for a resume
SAMPLERS = 1  # makes the random numbers of samplers other than those of the env with the same seed


class SyncEnvs:
    """Gymnasium envs, stepped one after another.

    gymnasium's own SyncVectorEnv takes as long as a small env itself; this class does not.

    `state()` and `restore()` bring the envs of a resumed run back by replaying their running episodes. The replay uses
    the attributes that the episode started with, and the values set by `set_attr` from the step on at which they were
    set. An attribute that is assigned directly (`envs.envs[0].unwrapped.g = 4.2`) is restored too, exactly if that
    happens between two episodes; during an episode, use `set_attr`.

    parameters: numbers and samplers, by name; see `set_parameters`
    make: called with arguments of the env's constructor, by name, returns another env with these arguments
    """

    def __init__(self, envs, parameters=None, make=None):
        self.envs = envs
        self.make = make
        self.num_envs = len(envs)
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.all_slots = np.ones(self.num_envs, bool)
        self.no_slots = np.zeros(self.num_envs, bool)

        # Action masks of discrete actions, from the method that sb3-contrib uses
        num_actions = count_discrete_actions(self.single_action_space)
        self.masks = {}
        if num_actions:
            self.masks["action_mask"] = np.ones((self.num_envs, num_actions), bool)
        self.masked = num_actions and hasattr(envs[0].unwrapped, "action_masks")

        # The running episodes, for state() and restore()
        self.first_seeds = None
        self.first_attributes = None  # of each env, after its first reset
        self.episodes = []
        self.last_obs = None

        # Environment parameters. Lists have an entry for each env
        self.parameters = {}
        self.places = {}
        self.rngs = [None] * self.num_envs  # of the samplers
        self.values = [{} for _ in envs]  # in the running episode
        self.first_values = [{} for _ in envs]  # when the env was made
        self.set_parameters(parameters or {})

    def reset(self, seed):
        seeds = [derive_seed(seed, i) for i in range(self.num_envs)]
        observations = []
        self.episodes = []
        for i, env_seed in enumerate(seeds):
            self.rngs[i] = np.random.default_rng([env_seed, SAMPLERS])
            self._draw_parameters(i)
            env = self.envs[i]
            if self.first_seeds is None:
                self.first_values[i] = self.values[i]
            episode = Episode(env, seed=env_seed)
            observations.append(episode.reset(env))
            self.episodes.append(episode)
        if self.first_seeds is None:
            self.first_seeds = seeds
            self.first_attributes = [attributes.read(env) for env in self.envs]
        return self._gather(observations), self._first_infos()

    def _first_infos(self):
        return {"ready": self.all_slots, "closed": self.no_slots} | self.mask()

    def mask(self):
        if self.masked:
            rows = [np.hstack(env.unwrapped.action_masks()) for env in self.envs]  # of all branches
            self.masks = {"action_mask": np.array(rows, bool)}
        return self.masks

    def _gather(self, observations):
        """Return the observations of all envs as one array, and keep it for state()."""
        shape = (self.num_envs, *self.single_observation_space.shape)
        self.last_obs = np.stack(observations).astype(np.float32).reshape(shape)
        check_numbers(self.last_obs)
        return self.last_obs

    def step(self, actions):
        n = self.num_envs
        shape = self.single_observation_space.shape
        obs = np.empty((n, *shape), np.float32)
        rewards = np.empty(n)
        terminated = np.empty(n, bool)
        truncated = np.empty(n, bool)
        infos = {"ready": self.all_slots, "closed": self.all_slots}

        for i, env in enumerate(self.envs):
            episode = self.episodes[i]
            first = not episode.actions
            if first:
                episode.note_first_step(env)
            observation, rewards[i], term, trunc, info = contract.step(env, actions[i])
            terminated[i] = term
            truncated[i] = trunc
            if getattr(observation, "shape", None) != shape:  # numpy would copy one number into all
                contract.check_observation(env, observation)
            if term or trunc:
                infos.setdefault("final_obs", {})[i] = np.asarray(observation, np.float32)
                success = contract.read_success(env, info)
                if success is not None:
                    infos.setdefault("is_success", {})[i] = success
                observation = self._next_episode(i)
            elif len(episode.actions) < MAX_REPLAY_STEPS:
                episode.actions.append(actions[i].copy())
            obs[i] = observation
        self.last_obs = obs

        # The test of find_invalid, without the call
        if not (np.vdot(obs, obs) <= SAFE_SQUARES and np.vdot(rewards, rewards) <= SAFE_SQUARES):
            check_numbers(obs, rewards)
        for i, final_obs in infos.get("final_obs", {}).items():
            check_numbers(final_obs[None], env=i)
        return obs, rewards, terminated, truncated, infos | self.mask() if self.masks else infos

    def _next_episode(self, i):
        """Start a new episode of env i and return its first observation."""
        if self.parameters:
            self._draw_parameters(i)
        self.episodes[i] = Episode(self.envs[i])
        return self.episodes[i].reset(self.envs[i])

    def set_parameters(self, parameters):
        """Set environment parameters, numbers and samplers by name, from the next episode of each env on."""
        parsed = {name: parse(value) for name, value in parameters.items()}
        self.places |= env_parameters.find_places(self.envs[0], parsed)
        self.parameters |= parsed

    def try_parameter(self, name, value):
        """Make an env with a value of a parameter, if the parameter is an argument of the constructor, and close it.

        A ValueError or EngineError says why the value can't be used. value: a number or a sampler, whose ends are tried
        """
        places = env_parameters.find_places(self.envs[0], [name])
        for x in env_parameters.typical_values(parse(value)):
            values = env_parameters.draw({name: x}, places, rng=None)
            if env_parameters.arguments_among(values, places):
                self.places |= places
                self._new_env(0, values).close()

    def _draw_parameters(self, i):
        """Give the parameters of env i their values for its next episode."""
        values = env_parameters.draw(self.parameters, self.places, self.rngs[i])
        arguments = env_parameters.arguments_among(values, self.places)
        if arguments != env_parameters.arguments_among(self.values[i], self.places):
            self._make_again(i, values)
        self.values[i] = values
        env_parameters.set_attributes(self.envs[i], values, self.places)

    def _make_again(self, i, values):
        """Replace env i by one whose constructor gets other arguments. It continues the random numbers of the last."""
        env = self._new_env(i, values)
        if self.first_seeds is not None:
            self._prepare(env, i, self.first_seeds[i], values)
            state = self.envs[i].unwrapped.np_random.bit_generator.state
            env.unwrapped.np_random.bit_generator.state = state
        self.envs[i].close()
        self.envs[i] = env

    def _new_env(self, i, values):
        arguments = env_parameters.arguments_among(values, self.places)
        env = self.make(arguments)
        for ours, theirs in (
            (self.single_observation_space, env.observation_space),
            (self.single_action_space, env.action_space),
        ):
            if ours != theirs:
                env.close()
                fix = "the agent needs the same in all lessons"
                raise EngineError(
                    f"with {arguments} env {i} has the space {theirs}, before it had {ours}: {fix}"
                )
        return env

    def _prepare(self, env, i, first_seed, values):
        """Make the first reset of a new env, with the same result in a resumed run."""
        env_parameters.set_attributes(env, values, self.places)
        env.reset(seed=first_seed)
        self.first_values[i] = values
        self.first_attributes[i] = attributes.read(env)

    def get_attr(self, name):
        """Return the attribute `name` of each env, from `env.unwrapped`."""
        return tuple(getattr(env.unwrapped, name) for env in self.envs)

    def set_attr(self, name, value):
        """Set the attribute `name` of each env, on `env.unwrapped`.

        value: one value for all envs, or a list or tuple with one value per env
        """
        for i, env_value in enumerate(values_per_env(value, self.num_envs)):
            setattr(self.envs[i].unwrapped, name, env_value)
            if self.episodes and attributes.is_plain(env_value):
                self.episodes[i].note_assigned(name, attributes.encode(env_value))

    def state(self):
        """Return what `restore` needs to continue the running episodes, or None if one of them is too long."""
        episodes = self.episode_states()
        if episodes is None:
            return None
        return {"episodes": episodes, "obs": self.last_obs.copy()}

    def episode_states(self):
        """Return the running episodes in a form that JSON can write, except their actions. None if one is too long."""
        if any(len(episode.actions) >= MAX_REPLAY_STEPS for episode in self.episodes):
            return None
        states = []
        for i, episode in enumerate(self.episodes):
            state = episode.state(self.envs[i], self.first_attributes[i])
            first = {"first_seed": self.first_seeds[i], "first_parameters": self.first_values[i]}
            now = {"parameters": self.values[i], "samplers": self.rngs[i].bit_generator.state}
            states.append({**first, **now, **state})
        return states

    def restore(self, state):
        """Continue the episodes of `state` by replaying their actions. The envs must be new.

        An env whose randomness all comes from its np_random returns exactly. If a replay does not end with the saved
        observation, the env starts a new episode: infos["restarted"] is True for its slot.
        """
        self.last_obs = np.asarray(state["obs"], np.float32)
        observations, restarted = self._replay(state["episodes"])
        report_restarted(restarted)
        return self._gather(observations), self._first_infos() | restarted_info(
            restarted, self.num_envs
        )

    def _replay(self, states):
        """Replay the running episode of each env. Return the observations and the envs that start a new episode."""
        self.first_seeds = [state["first_seed"] for state in states]
        self.first_attributes = [None] * self.num_envs
        self.episodes = []
        observations = []
        restarted = []
        for i, state in enumerate(states):
            # The first reset of the env again, so that attributes of its first episode are the same. Checkpoints of
            # earlier versions have no parameters
            self.rngs[i] = np.random.default_rng([state["first_seed"], SAMPLERS])
            if "samplers" in state:
                self.rngs[i].bit_generator.state = state["samplers"]
            first_values = state.get("first_parameters", {})
            self.values[i] = state.get("parameters", {})
            self.places |= env_parameters.find_places(
                self.envs[i], {**first_values, **self.values[i]}
            )
            if env_parameters.arguments_among(first_values, self.places):
                env = self._new_env(i, first_values)
                self.envs[i].close()
                self.envs[i] = env
            env = self.envs[i]
            self._prepare(env, i, state["first_seed"], first_values)
            env_parameters.set_attributes(env, self.values[i], self.places)
            episode, observation = Episode.replay(env, state)
            self.episodes.append(episode)
            same = observation is not None and self._equals_last(i, observation)

            # Attributes that were assigned after the last step, or during an episode that cannot be replayed
            for name in attributes.write(env, state["attributes_now"]):
                episode.note_assigned(name, state["attributes_now"][name])
            if not same:
                restarted.append(i)
                observation = self._next_episode(i)
            observations.append(observation)
        return observations, restarted

    def _equals_last(self, i, observation):
        """Return whether an observation of env i equals the saved one."""
        return np.asarray(observation, np.float32).tobytes() == self.last_obs[i].tobytes()

    def close(self):
        for env in self.envs:
            env.close()


class Episode:
    """The running episode of one env: what is needed to replay it from its start."""

    def __init__(self, env, seed=None):
        """seed: of the env's reset; without one, the state of its random generator is kept."""
        self.seed = seed
        self.random = None if seed is not None else env.unwrapped.np_random.bit_generator.state
        self.before_reset = attributes.read(env)
        self.after_reset = None
        self.at_first_step = None
        self.assigned_later = []  # attributes that were set after the first step
        self.actions = []

    def reset(self, env):
        """Start the episode and return its first observation."""
        try:
            observation, info = env.reset(seed=self.seed)
            if not isinstance(info, dict):
                raise TypeError("reset returned no info")
            contract.check_observation(env, observation)
        except (TypeError, ValueError) as error:
            contract.explain_reset(env, error)
            raise
        self.after_reset = attributes.read(env)
        return observation

    def note_first_step(self, env):
        """Remember the attributes before the first step: they may have been assigned since the reset."""
        self.at_first_step = attributes.read(env)

    def note_assigned(self, name, value):
        """Remember that the attribute `name` got the encoded `value` before the next step."""
        if self.actions:  # otherwise note_first_step reads it
            self.assigned_later.append({"step": len(self.actions), "name": name, "value": value})

    def state(self, env, first_attributes):
        """Return the episode as `replay` takes it.

        first_attributes: the env's attributes after its very first reset, which `restore` repeats
        """
        now = attributes.read(env)
        before_reset = attributes.differences(first_attributes, self.before_reset)
        at_first_step = attributes.differences(
            self.after_reset, self.at_first_step if self.actions else now
        )
        # The replay assigns these, even if they have their first value again now
        assigned = {
            *before_reset,
            *at_first_step,
            *(change["name"] for change in self.assigned_later),
        }
        return {
            "seed": self.seed,
            "random": self.random,
            "attributes_before_reset": before_reset,
            "attributes_at_first_step": at_first_step,
            "attributes_later": list(self.assigned_later),
            "attributes_now": attributes.differences(first_attributes, now, always=assigned),
            "actions": list(self.actions),
        }

    @classmethod
    def replay(cls, env, state):
        """Return the episode of `state`, replayed in `env`, and its last observation.

        The observation is None if the episode ends during the replay, which it did not when it was recorded.
        """
        attributes.write(env, state["attributes_before_reset"])
        if state["random"] is not None:
            env.unwrapped.np_random.bit_generator.state = state["random"]
        episode = cls(env, state["seed"])
        observation = episode.reset(env)
        attributes.write(env, state["attributes_at_first_step"])

        later = {}  # by step
        for change in state["attributes_later"]:
            later.setdefault(change["step"], []).append(change)

        actions = list(np.asarray(state["actions"], env.action_space.dtype))
        for step, action in enumerate(actions):
            if step == 0:
                episode.note_first_step(env)
            episode._assign_again(env, later.get(step, ()))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                return episode, None
            episode.actions.append(action)
        episode._assign_again(env, later.get(len(actions), ()))
        return episode, observation

    def _assign_again(self, env, changes):
        """Repeat assignments that were made before a step."""
        for change in changes:
            attributes.assign(env, change["name"], change["value"])
            self.assigned_later.append(change)


class RecordedEnvs(SyncEnvs):
    """One env and a video of it."""

    def __init__(self, env, path, parameters=None, make=None):
        choose_gl()
        super().__init__([env], parameters, make)
        if hasattr(env.unwrapped, "model"):
            disable_expensive_rendering(env.unwrapped.model)
        self.video = video_writer(path, env.metadata.get("render_fps", 30))

    def _append_frame(self):
        try:
            image = self.envs[0].render()
        except Exception as error:
            raise ValueError(f"recording a video {NEEDS_GL} ({error})") from None
        self.video.append_data(image)

    def reset(self, seed):
        out = super().reset(seed)
        self._append_frame()
        return out

    def step(self, actions):
        out = super().step(actions)
        if (
            "final_obs" not in out[-1]
        ):  # at an end, the env already shows the next episode's first state
            self._append_frame()
        return out

    def close(self):
        try:
            self.video.close()
        finally:
            super().close()


def count_discrete_actions(space):
    """Return the number of discrete actions of all branches together, 0 for continuous actions."""
    if isinstance(space, HybridSpace):
        return sum(space.branches)
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, gym.spaces.MultiDiscrete) else 0


def values_per_env(value, num_envs):
    """Return one value per env, from one value for all of them or from a list or tuple, as gymnasium does it."""
    if not isinstance(value, (list, tuple)):
        return [value] * num_envs
    if len(value) != num_envs:
        raise ValueError(
            f"set_attr got {len(value)} values for {num_envs} envs: pass one value, or one per env"
        )
    return value


def report_restarted(restarted):
    """Print which envs start a new episode because their episode could not be replayed."""
    if restarted:
        which = (
            f"Env {restarted[0]}"
            if len(restarted) == 1
            else f"Envs {', '.join(map(str, restarted))}"
        )
        advice = "use envs.set_attr to change attributes and np_random for random numbers"
        print(
            f"{which}: the replay did not end with the saved observation, a new episode starts; {advice}",
            flush=True,
        )


def restarted_info(restarted, num_envs):
    """Return infos["restarted"], the mask of the slots that start a new episode, if there are any."""
    if not restarted:
        return {}
    mask = np.zeros(num_envs, bool)
    mask[restarted] = True
    return {"restarted": mask}


def check_numbers(obs, rewards=None, env=0):
    """Raise an error that names the first reward or observation that is not valid: it would spoil the weights.

    env: the number of the env that the first row belongs to
    """
    fix = "clip it in the env, or end the episode before"
    if rewards is not None and (found := find_invalid(rewards)):
        i, _ = found
        raise EngineError(f"env {env + i}: reward is {describe(rewards[i])}: {fix}")
    if found := find_invalid(obs):
        i, k = found
        number = describe(obs[i].reshape(-1)[k])
        raise EngineError(f"env {env + i}: observation {k} is {number}: {fix}")
