"""Runs in the candidate's sandbox, beside the program: calls its functions and writes what they return.

Owns nothing that matters: the program can read and change all of this, and gains nothing by it, since the only thing that leaves
is a bounded text that is checked outside. The text of this file is what a sandbox gets (``plain`` stands before it there).
"""

import json
import os

from rollbook.tasks.verdicts.plain import Unplain, decode, encode


def _take_requests():
    """Requests come on a descriptor of their own: a program that reads its standard input finds that empty."""
    own = os.dup(0)
    read, write = os.pipe()
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
    return os.fdopen(own, "rb")


def serve(namespace, answer):
    """Answer request after request until there are no more."""
    for line in _requests:
        asked = _loads(line)
        said = {"id": asked["id"]}
        try:
            if asked["name"] not in namespace:
                raise NameError(f"name {asked['name']!r} is not defined")
            value = namespace[asked["name"]](*decode(asked["args"]), **decode(asked["kwargs"]))
            said["ok"] = encode(value)
        except MemoryError:
            raise
        except Unplain as error:
            said["invalid"] = str(error)[:500]
        except Exception as error:  # noqa: BLE001 - what the program raises is its answer
            said["error"], said["text"] = str(type(error).__name__)[:80], str(error)[:500]
        answer(_dumps(said).encode())


_loads, _dumps = json.loads, json.dumps
if __name__ == "__setup__":
    _requests = _take_requests()
