"""Two threads that wait, for py-spy: MainThread in time.sleep, one with a name in quotes in Event.wait."""

import threading
import time


def wait_for(event, label={"kind": [1, 2]}):  # noqa: B006
    event.wait()


event = threading.Event()
threading.Thread(target=wait_for, args=(event,), name='wait "x"', daemon=True).start()
time.sleep(20)
