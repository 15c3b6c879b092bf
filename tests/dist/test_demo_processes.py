"""The demo's children: what they say arrives, who fails is named, and none is ever left behind."""

import os
import signal
import sys
import textwrap
import time

import anyio
import anyio.to_thread
import pytest

from stream_balancer.demo.messages import Put, Task
from stream_balancer.demo.options import DemoOptions
from stream_balancer.demo.processes import ChildError, run_children

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def task(rank):
    return Task(rank=rank, policy="window", options=DemoOptions(), store_port=1)


def python(script):
    """A stand-in for the child's command: sees its task as ``task``, and can ``say`` a message."""
    prelude = """
    import json, os, signal, sys, time
    task = json.loads(sys.stdin.readline())
    def say(text): print(json.dumps({"type": "Put", "rollout_id": text, "checksum": 1, "num_tokens": 1}), flush=True)
    """
    return [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)]


def is_running(pid):
    """Whether the process is there and not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid):
    give_up = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < give_up, "still running"
        time.sleep(0.02)


async def test_every_child_gets_its_task_and_all_messages_arrive():
    said = []
    await run_children([task(None), task(0), task(1)], said.append, python("say(str(task['rank']))"))
    assert sorted(m.rollout_id for m in said) == ["0", "1", "None"]
    assert all(isinstance(m, Put) for m in said)


async def test_a_failing_child_is_named_with_its_last_words_and_the_others_are_ended():
    pids = []
    script = """
    say(str(os.getpid()))
    if task["rank"] == 1:
        time.sleep(0.3)
        sys.exit("a tensor was too large")
    time.sleep(600)
    """
    with pytest.raises(ChildError, match=r"(?s)rank 1 \(process \d+\) ended with exit code 1.*a tensor was too large"):
        await run_children([task(None), task(0), task(1)], lambda m: pids.append(int(m.rollout_id)), python(script))
    assert len(pids) == 3
    assert not any(map(is_running, pids))


async def test_a_killed_child_is_named_with_the_signal():
    with pytest.raises(ChildError, match=r"controller \(process \d+\) was killed by SIGKILL. It said nothing"):
        await run_children([task(None)], print, python("os.kill(os.getpid(), signal.SIGKILL)"))


async def test_a_child_that_dies_before_reading_its_task_is_an_error_of_its_own():
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with pytest.raises(ChildError, match=r"rank 0 .* exit code 3"):
        await run_children([task(0)], print, command)


async def test_cancelling_ends_every_child():
    pids = []
    with anyio.move_on_after(30) as scope:

        def on_message(message):
            pids.append(int(message.rollout_id))
            if len(pids) == 2:
                scope.cancel()

        await run_children([task(0), task(1)], on_message, python("say(str(os.getpid())); time.sleep(600)"))
    assert len(pids) == 2
    assert not any(map(is_running, pids))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks into /proc")
@pytest.mark.processes
async def test_children_exit_when_their_parent_is_killed():
    """The real child's watching thread, without a task's work: a parent that dies takes the child with it."""
    script = """
    import os, subprocess, sys, time
    child = "import os, threading, time; from stream_balancer.demo.child import _exit_with_parent as watch; "
    child += "threading.Thread(target=watch, daemon=True).start(); print('on', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, flush=True)
    time.sleep(600)
    """
    async with await anyio.open_process([sys.executable, "-c", textwrap.dedent(script)]) as parent:
        pid = int(await parent.stdout.receive())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    await anyio.to_thread.run_sync(wait_until_gone, pid)
