"""Protocol model: the commit protocol of checkpoints as a transition system, and its exhaustive exploration.

A state is a world (HEAD, files, pins, intents) and the place of every actor in its program. Each step is one operation
on the store. From a state every actor may take its next step, so that `explore` visits all interleavings:

* A crash needs no step of its own. It is a stall that never ends; an actor that stalls and comes back is a zombie.
* Time is not modelled. An observer may declare any writer or pin dead whenever it likes, alive or not.
* A put may be applied though its answer is lost, or be applied later than its error was seen.
* An absent file is read as an error, or as a hole without an error, as array formats with fill values read it.
* On a disk, writes are volatile until they are synced, and a sync may fail. In every state, a power cut must leave
  HEAD with a whole generation, and every save that has returned.

`Rules` has the rules that make the protocol safe. Each can be left out, which must break a promise. From every state
it is also checked that a fresh save succeeds, and leaves no litter, if the others do nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations
from typing import NamedTuple

FILES = ('MANIFEST', 'b', 'a')


class Broken(Exception):
  """A promise that does not hold. `explore` adds the steps that lead there."""


class Rules(NamedTuple):
  """The rules of the protocol. A rule that is False is left out."""

  conditional_take: bool = True
  conditional_commit: bool = True
  conditional_release: bool = True
  conditional_removal_of_head: bool = True
  unique_generation_names: bool = True
  manifest_before_head: bool = True
  garbage_listed_before_take: bool = True
  garbage_removed_after_take: bool = True
  generation_of_head_kept: bool = True
  release_names_the_old: bool = True
  pins_respected: bool = True
  second_look: bool = True
  last_look: bool = True
  manifest_removed_first: bool = True
  unanswered_commit_looked_up: bool = True
  fence_before_own_removal: bool = True
  superseded_commit_left_alone: bool = True
  intent_before_take: bool = True
  intent_removed_last: bool = True
  unnamed_before_removal: bool = True
  unname_durable: bool = True
  synced_before_commit: bool = True
  errors_of_sync_raised: bool = True
  take_durable: bool = True
  commit_durable: bool = True
  failed_commit_repeated: bool = True
  folders_above_synced: bool = True
  found_kept_until_commit: bool = True
  second_look_for_lost: bool = True


class Head(NamedTuple):
  """HEAD. `put` differs in every put; it stands for the tag."""

  generation: str | None
  writer: str | None
  put: str


class World(NamedTuple):
  """The store, and after `named` what no actor can see.

  Attributes:
    late: puts on their way (tag, HEAD): each is applied later if HEAD still has the tag, or never.
    volatile: files that a power cut may remove.
    past: values of HEAD that a power cut may bring back, with their `saves`.
    entry: whether the folder of the path is there after a power cut.
    named: generations that HEAD has named.
    saves: number of times that HEAD has named another generation.
    returned: `saves` at the last save that returned.
    disturbed: readers whose pin was declared dead.
    declared: writers that another has taken for dead.
    revived: those that wrote after that.
    lost: generation that a HEAD has named which is lost.
  """

  head: Head | None = None
  files: frozenset[tuple[str, str]] = frozenset()
  pins: frozenset[tuple[str, str]] = frozenset()
  intents: frozenset[str] = frozenset()
  late: frozenset[tuple[str | None, Head]] = frozenset()
  disk: bool = False
  volatile: frozenset[tuple[str, str]] = frozenset()
  past: tuple[tuple[Head | None, int], ...] = ()
  entry: bool = True
  named: frozenset[str] = frozenset()
  saves: int = 0
  returned: int = 0
  disturbed: frozenset[str] = frozenset()
  declared: frozenset[str] = frozenset()
  revived: frozenset[str] = frozenset()
  lost: str | None = None


class Actor(NamedTuple):
  """An actor: its program (`kind`), its place in it (`at`), and all that it remembers."""

  name: str
  kind: str  # save, delete, sweep (by a save to a path beside), read, read_only
  at: str
  generation: str | None = None  # that it writes or reads
  overwrite: bool = True
  faulty: bool = False  # its writes and syncs may fail, and the answers to its puts be lost
  seen: Head | None = None
  tag: str | None = None
  listed: frozenset[str] = frozenset()
  todo: tuple[tuple[str, str], ...] = ()
  then: str = ''
  intents: frozenset[str] = frozenset()
  saved: int = 0
  puts: int = 0
  hole: bool = False
  made: bool = False  # whether it made the folder of the path
  beats: bool = False
  attempted: bool = False
  found: frozenset[str] = frozenset()  # whole generations, where no HEAD names one


Steps = Iterator[tuple[World, Actor]]
PROGRAM: dict[str, Callable[[World, Actor, Rules], Steps]] = {}


def step(function):
  """Registers a step under its function's name."""
  PROGRAM[function.__name__] = function
  return function


def base(actor: Actor) -> str | None:
  """The generation that HEAD named when the actor read it."""
  return actor.seen.generation if actor.seen else None


def generations(world: World) -> frozenset[str]:
  """Generations of which there are files."""
  return frozenset(generation for generation, _ in world.files)


# HEAD


def put(
  world: World, actor: Actor, head: Head | None, expected: str | None, holds: bool
) -> World | None:
  """A put or removal of HEAD on condition of its tag; None if it is refused. `holds`: the rule of the condition."""
  if holds and expected != (world.head.put if world.head else None):
    return None
  before, after = (h.generation if h else None for h in (world.head, head))
  if before != after:
    allowed = {'save': (base(actor), actor.generation), 'delete': (base(actor), None)}.get(actor.kind)
    if (before, after) not in (allowed, allowed and allowed[::-1] if actor.kind == 'delete' else None):
      raise Broken(f'lost update: {actor.name} replaces {before} by {after}')
    if before and not actor.overwrite:
      raise Broken(f'{actor.name} overwrites {before}, though it may not')
    named = world.named | {after} if after else world.named
    world = world._replace(named=named, saves=world.saves + 1)
  if world.disk:
    past = (*world.past, (world.head, world.saves - (before != after)))
    world = world._replace(past=past)
  return noticed(world._replace(head=head), actor)


def noticed(world: World, actor: Actor) -> World:
  """Notices a write by an actor that another has taken for dead."""
  return world._replace(revived=world.revived | {actor.name}) if actor.name in world.declared else world


def next_head(actor: Actor, generation: str | None, writer: str | None) -> tuple[Head, Actor]:
  """A HEAD with a tag of its own, and the actor that remembers it."""
  tag = f'{actor.name}.{actor.puts}'
  return Head(generation, writer, tag), actor._replace(puts=actor.puts + 1, tag=tag)


def settling(world: World, actor: Actor, then: str, durable: bool = True) -> Actor:
  """On a disk a put is a rename, and durable once the folder is synced."""
  return actor._replace(at='settle', then=then) if world.disk and durable else actor._replace(at=then)


@step
def settle(world: World, actor: Actor, rules: Rules) -> Steps:
  """Syncs the folder of HEAD, and the folders above."""
  entry = world.entry or rules.folders_above_synced or actor.made
  yield world._replace(past=(), entry=entry), actor._replace(at=actor.then, then='')
  if actor.faulty and actor.puts < 4:
    undone = 'finished' if actor.kind == 'sweep' else 'undo_take'
    after_error = {'superseded': 'look_up', 'clean': 'finished'}.get(actor.then, undone)
    yield world, actor._replace(at=after_error, then='')


# Until HEAD is taken: saves, deletions, sweeps of a path beside


@step
def put_intent(world: World, actor: Actor, rules: Rules) -> Steps:
  """Before HEAD is put where it names nothing, or soon will. Overwriting needs none: the next save finds its garbage."""
  is_first = base(actor) is None and not actor.found
  needed = rules.intent_before_take and (actor.kind == 'delete' or is_first)
  yield (
    (world._replace(intents=world.intents | {actor.name}) if needed else world),
    actor._replace(at='take'),
  )


@step
def list_intents(world: World, actor: Actor, rules: Rules) -> Steps:
  """A sweep begins with the intents of some writers that it takes for dead."""
  for dead in chain.from_iterable(combinations(sorted(world.intents), n) for n in (3, 2, 1)):
    intents = frozenset(dead)
    left = world._replace(declared=world.declared | intents)
    if not rules.intent_removed_last:
      left = left._replace(intents=world.intents - intents)
    yield left, actor._replace(at='read_head', intents=intents)
  yield world, actor._replace(at='finished')


@step
def read_head(world: World, actor: Actor, rules: Rules) -> Steps:
  """Goes on, or gives up. A writer in HEAD is alive or dead, as the observer likes."""
  named = world.head is not None and world.head.generation is not None
  going = actor._replace(seen=world.head, at='list_garbage')
  if not rules.garbage_listed_before_take and actor.kind != 'delete':
    going = going._replace(at=_before_take(actor))
  if actor.kind == 'sweep' and (named or not (world.head or world.files)):
    yield world, actor._replace(at='remove_intent')
    return
  if named <= (actor.overwrite and actor.kind != 'sweep') and named >= (actor.kind == 'delete'):
    writer = world.head and world.head.writer
    yield world._replace(declared=world.declared | {writer}) if writer else world, going
    if writer:
      yield world, actor._replace(at='finished')
  else:
    yield world, actor._replace(at='finished')


def _before_take(actor: Actor) -> str:
  return 'take' if actor.kind == 'sweep' else 'put_intent'


@step
def list_garbage(world: World, actor: Actor, rules: Rules) -> Steps:
  """What is there before the take, and is not named, can never be named after it."""
  taken = actor.tag is not None or not rules.garbage_removed_after_take
  listed = actor._replace(at='collect' if taken else _before_take(actor), listed=generations(world))
  is_first = actor.kind == 'save' and base(actor) is None and not taken
  if is_first and listed.listed and rules.found_kept_until_commit:
    listed = listed._replace(at='look_for_lost')
  yield world, listed


@step
def look_for_lost(world: World, actor: Actor, rules: Rules) -> Steps:
  """Whole generations that no HEAD names: those of a lost one, if HEAD has not changed since they were listed."""
  if world.head != actor.seen and rules.second_look_for_lost:
    yield world, actor._replace(at='finished')
    return
  found = frozenset(each for each in actor.listed if (each, 'MANIFEST') in world.files)
  yield world, actor._replace(at=_before_take(actor), listed=actor.listed - found, found=found)


@step
def take(world: World, actor: Actor, rules: Rules) -> Steps:
  """The put that makes every older writer's put fail. For a sweep it is all of the fence."""
  head, taken = next_head(actor, base(actor), actor.name)
  expected = actor.seen.put if actor.seen else None
  after = put(world, actor, head, expected, rules.conditional_take)
  if after is None:
    yield world, actor._replace(at='finished' if actor.kind == 'sweep' else 'remove_intent')
    return
  # it is durable where something is removed before the commit, and where HEAD is new; a deletion unnames durably
  garbage = actor.listed | actor.found - {base(actor)}
  settles = actor.kind != 'delete' and bool(garbage or (actor.kind == 'save' and actor.seen is None))
  again = actor.kind == 'save' and base(actor) is None and not actor.found and rules.intent_before_take
  then = 'put_intent_again' if again else after_take(actor, rules)
  yield after, settling(world, taken, then, rules.take_durable and settles)
  if actor.faulty and not world.disk:  # not applied when the error is seen; the intent stays for a sweep
    yield world._replace(late=world.late | {(expected, head)}), taken._replace(at='undo_take')


@step
def undo_take(world: World, actor: Actor, rules: Rules) -> Steps:
  """After an error: HEAD is put without the lease, whether it has been taken, or will be later."""
  head, undone = next_head(actor, base(actor), None)
  for expected in (actor.seen.put if actor.seen else None, actor.tag):
    after = put(world, actor, head, expected, True)
    if after is not None:
      yield after, undone._replace(at='finished')
      return
  yield world, actor._replace(at='finished')


@step
def put_intent_again(world: World, actor: Actor, rules: Rules) -> Steps:
  """A slow writer may have been taken for dead before it had the lease."""
  intents = world.intents | {actor.name}
  yield world._replace(intents=intents), actor._replace(at=after_take(actor, rules))


def after_take(actor: Actor, rules: Rules) -> str:
  """The step after the lease has been taken."""
  if actor.kind == 'delete' and rules.unnamed_before_removal:
    return 'unname'
  if not rules.garbage_removed_after_take:
    return 'write' if actor.kind == 'save' else 'give_back'
  if not rules.garbage_listed_before_take:
    return 'list_garbage'
  return 'look_for_pins' if actor.kind == 'sweep' else 'collect'


@step
def unname(world: World, actor: Actor, rules: Rules) -> Steps:
  """A deletion: HEAD names nothing before anything is removed."""
  head, unnamed = next_head(actor, None, actor.name)
  after = put(world, actor, head, actor.tag, rules.conditional_commit)
  if after is None:
    yield world, actor._replace(at='finished')
  else:
    yield (
      after,
      settling(world, unnamed._replace(saved=after.saves), 'look_for_pins', rules.unname_durable),
    )


@step
def look_for_pins(world: World, actor: Actor, rules: Rules) -> Steps:
  """A sweep or a deletion removes all or nothing. Pins are alive or dead, as the observer likes."""
  dead = world.disturbed | {reader for reader, _ in world.pins}
  yield world._replace(pins=frozenset(), disturbed=dead), actor._replace(at='collect')
  if world.pins:
    yield world, actor._replace(at='name_again' if actor.kind == 'delete' else 'finished')


@step
def name_again(world: World, actor: Actor, rules: Rules) -> Steps:
  """A deletion that finds a pin. It leaves its intent to a sweep."""
  head, renamed = next_head(actor, base(actor), None)
  after = put(world, actor, head, actor.tag, rules.conditional_release)
  yield after or world, renamed._replace(at='finished')


# Garbage


@step
def collect(world: World, actor: Actor, rules: Rules) -> Steps:
  """Removes the listed generations, one after the other."""
  kept = {base(actor)} if rules.generation_of_head_kept and actor.kind != 'delete' else set()
  garbage = sorted(actor.listed - kept)
  if garbage:
    rest = actor._replace(listed=actor.listed - {garbage[0]})
    yield from remove_unless_pinned(world, rest, garbage[0], 'collect', rules)
    return
  stray = {pin for pin in world.pins if pin[1] not in generations(world)}
  if stray:
    dead = world.disturbed | {reader for reader, _ in stray}
    yield world._replace(pins=world.pins - stray, disturbed=dead), actor
  at = 'give_back'
  if actor.tag is None:  # the rule `garbage_removed_after_take` is left out
    at = _before_take(actor)
  elif actor.kind == 'save':
    at = 'write' if rules.manifest_before_head else 'commit'
  yield world, actor._replace(at=at, listed=frozenset())


def remove_unless_pinned(world: World, actor: Actor, generation: str, then: str, rules: Rules) -> Steps:
  """Removes a generation, MANIFEST first. Pins are alive or dead, as the observer likes."""
  pins = {pin for pin in world.pins if pin[1] == generation}
  files = FILES if rules.manifest_removed_first else FILES[::-1]
  removing = actor._replace(at='remove', then=then, todo=tuple((generation, file) for file in files))
  if pins and rules.pins_respected and actor.kind == 'save':
    dead = world.disturbed | {reader for reader, _ in pins}
    yield world._replace(pins=world.pins - pins, disturbed=dead), removing
    yield world, actor._replace(at=then)
  else:
    yield world, removing


@step
def remove(world: World, actor: Actor, rules: Rules) -> Steps:
  """Removes the next file that is there."""
  there = [file for file in actor.todo if file in world.files]
  if len(there) < 2:
    left = world._replace(files=world.files - set(there), volatile=world.volatile - set(there))
    yield left, actor._replace(at=actor.then, then='', todo=())
  else:
    left = world._replace(files=world.files - {there[0]}, volatile=world.volatile - {there[0]})
    yield left, actor._replace(todo=tuple(there[1:]))


# Writing and the commit


@step
def write(world: World, actor: Actor, rules: Rules) -> Steps:
  """Writes the next file, MANIFEST last. The disk may be full."""
  files = actor.todo or tuple((actor.generation, file) for file in reversed(FILES))
  volatile = world.volatile | {files[0]} if world.disk else world.volatile
  after = world._replace(files=world.files | {files[0]}, volatile=volatile)
  then = 'write'
  if len(files) == 2 and actor.beats:
    then = 'beat'
  elif len(files) == 1:
    then = 'sync' if world.disk and rules.synced_before_commit else 'commit'
    then = then if rules.manifest_before_head else 'superseded'
  yield noticed(after, actor), actor._replace(at=then, todo=files[1:])
  if actor.faulty:
    yield world, actor._replace(at='release', todo=())


@step
def sync(world: World, actor: Actor, rules: Rules) -> Steps:
  """Makes the files of the generation durable. After an error they never are."""
  volatile = frozenset(file for file in world.volatile if file[0] != actor.generation)
  yield world._replace(volatile=volatile), actor._replace(at='commit')
  if actor.faulty:
    yield world, actor._replace(at='release' if rules.errors_of_sync_raised else 'commit')


@step
def beat(world: World, actor: Actor, rules: Rules) -> Steps:
  """Renews the lease."""
  head, beaten = next_head(actor, base(actor), actor.name)
  after = put(world, actor, head, actor.tag, True)
  if after is None:
    yield world, actor._replace(at='clean', todo=())
  else:
    yield after, beaten._replace(at='write')
  yield (
    world._replace(late=world.late | {(actor.tag, head)}),
    actor._replace(at='write', puts=beaten.puts),
  )


@step
def commit(world: World, actor: Actor, rules: Rules) -> Steps:
  """The put that names the new generation."""
  head, committed = next_head(actor._replace(attempted=True), actor.generation, None)
  after = put(world, actor, head, actor.tag, rules.conditional_commit)
  then = 'superseded' if rules.manifest_before_head else 'write'
  at = 'look_up' if rules.unanswered_commit_looked_up else 'clean'
  unsure = actor._replace(at=at, puts=committed.puts, attempted=True)
  if after is None:
    yield world, unsure
  else:
    yield after, settling(world, committed._replace(saved=after.saves), then, rules.commit_durable)
  if actor.faulty and not world.disk:
    if after is not None:  # the answer is lost, and that of the second attempt is "refused"
      yield after, unsure._replace(saved=after.saves)
    yield world._replace(late=world.late | {(actor.tag, head)}), unsure


@step
def look_up(world: World, actor: Actor, rules: Rules) -> Steps:
  """After a put that was refused or had no answer: HEAD shows whether it was applied. If not, it still may be."""
  head = world.head
  mine = head is not None and head.generation == actor.generation
  if mine and not (world.disk and rules.failed_commit_repeated):
    yield world, actor._replace(at='superseded', saved=world.saves)
  elif mine and head.put == actor.tag:
    yield world, actor._replace(at='commit')
  elif head and head.writer == actor.name:
    if actor.attempted and actor.puts < 4:
      yield world, actor._replace(at='commit', tag=head.put)
    then = 'release' if rules.fence_before_own_removal else 'clean'
    yield world, actor._replace(at=then, tag=head.put)
  elif actor.attempted and rules.superseded_commit_left_alone:
    yield world, actor._replace(at='finished')
  else:
    yield world, actor._replace(at='clean', tag=None)


@step
def release(world: World, actor: Actor, rules: Rules) -> Steps:
  """Gives HEAD back after a failure. A put that is still on its way can then no longer be applied."""
  old = base(actor) if rules.release_names_the_old else actor.generation
  head, released = next_head(actor, old, None)
  after = put(world, actor, head, actor.tag, rules.conditional_release)
  if after is None:
    yield world, actor._replace(at='look_up', tag=None)
  else:
    yield after, settling(world, released, 'clean')


@step
def clean(world: World, actor: Actor, rules: Rules) -> Steps:
  """Removes the writer's own generation, which can no longer be named; then the HEAD of a first save."""
  files = tuple((actor.generation, file) for file in FILES)
  stays = base(actor) or (actor.found and actor.seen and actor.seen.writer)  # it is not lost
  then = 'give_back' if actor.tag and not stays else 'remove_intent'
  yield world, actor._replace(at='remove', then=then, todo=files)


@step
def superseded(world: World, actor: Actor, rules: Rules) -> Steps:
  """Removes the generations that the new one has replaced."""
  old = base(actor) or min(actor.found, default=None)
  if old is None:
    yield world, actor._replace(at='report')
  else:
    left = actor._replace(found=actor.found - {old})
    yield from remove_unless_pinned(world, left, old, 'superseded' if left.found else 'report', rules)


@step
def report(world: World, actor: Actor, rules: Rules) -> Steps:
  """The save returns."""
  if actor.generation not in world.named:
    raise Broken(f'{actor.name} returns, and HEAD has never named its generation')
  yield world._replace(returned=max(world.returned, actor.saved)), actor._replace(at='remove_intent')


@step
def give_back(world: World, actor: Actor, rules: Rules) -> Steps:
  """The end of a sweep, a deletion or a failed first save: an empty path loses its HEAD."""
  after = put(world, actor, None, actor.tag, rules.conditional_removal_of_head)
  if after is None:
    yield world, actor._replace(at='finished')
  else:
    yield after, actor._replace(at='remove_intent', tag=None)


@step
def remove_intent(world: World, actor: Actor, rules: Rules) -> Steps:
  """The last step. A writer that removes its own intent was not dead."""
  gone = actor.intents | {actor.name}
  after = noticed(world._replace(intents=world.intents - gone), actor)
  yield after, actor._replace(at='finished', intents=frozenset())


# Readers


@step
def look(world: World, actor: Actor, rules: Rules) -> Steps:
  """Reads HEAD."""
  generation = world.head.generation if world.head else None
  then = 'finished' if generation is None else 'pin' if actor.kind == 'read' else 'read'
  yield world, actor._replace(at=then, generation=generation, hole=False, todo=())


@step
def pin(world: World, actor: Actor, rules: Rules) -> Steps:
  """Pins the generation."""
  pinned = world._replace(
    pins=world.pins | {(actor.name, actor.generation)}, disturbed=world.disturbed - {actor.name}
  )
  yield pinned, actor._replace(at='look_again' if rules.second_look else 'read')


@step
def look_again(world: World, actor: Actor, rules: Rules) -> Steps:
  """The pin counts if HEAD still names the generation."""
  same = world.head and world.head.generation == actor.generation
  yield world, actor._replace(at='read') if same else actor._replace(at='unpin', then='look')


@step
def read(world: World, actor: Actor, rules: Rules) -> Steps:
  """Reads the next file. An absent one is an error, or a hole."""
  files = actor.todo or tuple((actor.generation, file) for file in ('a', 'b'))
  then = actor._replace(at='read' if len(files) > 1 else 'look_last', todo=files[1:])
  if files[0] in world.files:
    yield world, then
    return
  if actor.kind == 'read' and actor.name not in world.disturbed:
    raise Broken(f'{actor.name} loses {files[0]} under its pin')
  yield world, then._replace(hole=True)
  yield world, actor._replace(at='look_after_error', todo=())


@step
def look_after_error(world: World, actor: Actor, rules: Rules) -> Steps:
  """Damage, if HEAD still names the generation; else a reason to repeat."""
  if world.head and world.head.generation == actor.generation:
    raise Broken(f'{actor.name} reports damage of {actor.generation}')
  yield world, actor._replace(at='unpin', then='look')


@step
def look_last(world: World, actor: Actor, rules: Rules) -> Steps:
  """All that was read was there if MANIFEST is still there, which is removed first."""
  if (actor.generation, 'MANIFEST') not in world.files and rules.last_look:
    yield world, actor._replace(at='unpin', then='look', hole=False)
  elif actor.hole:
    raise Broken(f'{actor.name} returns arrays with holes')
  else:
    yield world, actor._replace(at='unpin', then='finished')


@step
def unpin(world: World, actor: Actor, rules: Rules) -> Steps:
  """Removes the pin."""
  pins = frozenset(pin for pin in world.pins if pin[0] != actor.name)
  yield world._replace(pins=pins), actor._replace(at=actor.then, then='', generation=None, todo=())


# Exploration


class State(NamedTuple):
  """A world, and its actors."""

  world: World
  actors: tuple[Actor, ...]


def successors(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
  """Every next state, with the name of the step."""
  world, actors = state
  for tag, head in world.late:
    left = world._replace(late=world.late - {(tag, head)})
    if world.head and world.head.put == tag:
      sender = next(actor for actor in actors if actor.name == head.put.partition('.')[0])
      yield 'a late put is applied', State(put(left, sender, head, tag, True) or left, actors)
  for place, actor in enumerate(actors):
    if actor.at != 'finished':
      for after, moved in PROGRAM[actor.at](world, actor, rules):
        others = (*actors[:place], moved, *actors[place + 1 :])
        yield f'{actor.name} {actor.at}', State(after, others)


class Explored(NamedTuple):
  """The result of an exploration.

  Attributes:
    states: number of states.
    places: places in their programs that actors have reached.
    ends: the generations that HEAD has named, for each way in which all actors finish.
  """

  states: int
  places: frozenset[str]
  ends: frozenset[frozenset[str]]


def explore(start: State, rules: Rules) -> Explored:
  """Visits every state that can be reached, breadth first.

  Raises:
    Broken: a promise does not hold; with the shortest steps that lead there.
  """
  came_from: dict[State, tuple[State, str] | None] = {start: None}
  worlds: set[World] = set()
  queue = [start]
  for state in queue:
    try:
      if state.world not in worlds:
        worlds.add(state.world)
        check(state.world)
      following = list(successors(state, rules))
    except Broken as error:
      raise Broken('\n'.join([str(error), *steps_to(state, came_from)])) from None
    for name, after in following:
      if after not in came_from:
        came_from[after] = (state, name)
        queue.append(after)
  places = frozenset(actor.at for state in queue for actor in state.actors)
  ends = (state.world.named for state in queue if {actor.at for actor in state.actors} == {'finished'})
  return Explored(len(queue), places, frozenset(ends))


def steps_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
  """The names of the steps that lead to a state."""
  names = []
  while (before := came_from[state]) is not None:
    state, name = before
    names.append(f'  {name}')
  return names[::-1]


def check(world: World) -> None:
  """The promises that hold in every world.

  Raises:
    Broken: one does not.
  """
  check_head(world)
  if world.disk:
    for after in power_cuts(world):
      check_fresh_save(after)
  check_fresh_save(world)
  check_fresh_sweep(world)


def check_head(world: World) -> None:
  """HEAD names a whole generation, whichever value and files a power cut leaves."""
  for head, saves in ((world.head, world.saves), *world.past):
    for file in FILES if head and head.generation else ():
      if (head.generation, file) not in world.files - world.volatile:
        raise Broken(f'HEAD names {head.generation} without {file}')
    if saves < world.returned:
      raise Broken('a power cut removes a save that has returned')
  if world.lost and not world.saves and any((world.lost, file) not in world.files for file in FILES):
    raise Broken(f'{world.lost}, whose HEAD is lost, goes before another is saved')
  if world.returned and not world.entry:
    raise Broken('a power cut removes the folder of a save that has returned')


def power_cuts(world: World) -> Iterator[World]:
  """What a power cut may leave: any value of HEAD that is not settled yet, and any volatile files."""
  for head, _ in ((world.head, 0), *world.past):
    for files in (world.files, world.files - world.volatile):
      yield World(head, files, world.pins, world.intents)


def check_fresh_save(world: World) -> None:
  """If all others do nothing more, a save succeeds and leaves HEAD, one generation and nothing else."""
  fresh = Actor('fresh', 'save', 'read_head', 'gen-fresh', intents=world.intents)
  left = run(world, fresh)
  files = {('gen-fresh', file) for file in FILES}
  if left.head is None or left.head[:2] != ('gen-fresh', None):
    raise Broken('a save finds no way on')
  if left.files != files or left.pins or left.intents:
    raise Broken(f'litter after a save: {left}')


def check_fresh_sweep(world: World) -> None:
  """If all others do nothing more, a save to a path beside leaves a checkpoint, or nothing at all.

  Unless a writer was alive that it took for dead. The next save to the path itself then removes the rest.
  """
  left = run(world, Actor('sweep', 'sweep', 'list_intents'))
  named = left.head is not None and left.head.generation is not None
  if (left.intents or (not named and (left.head or left.files))) and not (world.revived or world.lost):
    raise Broken(f'litter after a sweep: {left}')


def run(world: World, actor: Actor) -> World:
  """Runs one actor to its end: it takes all others for dead."""
  while actor.at != 'finished':
    world, actor = next(PROGRAM[actor.at](world, actor, Rules()))
  return world
