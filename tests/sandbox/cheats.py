"""Programs that want to be paid for ``add(a, b)`` without adding, and what each protocol says of them."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.core.records import SandboxStatus as S
from rollbook.core.sandboxing import Limits

LIMITS = Limits(cpu_s=0.6, wall_s=15.0, memory_bytes=128 << 20, output_bytes=1 << 20)
SHORT = Limits(cpu_s=0.6, wall_s=1.0, memory_bytes=128 << 20, output_bytes=1 << 20)


@dataclass(frozen=True)
class Cheat:
    source: str
    calls: S
    asserts: S

    @property
    def limits(self) -> Limits:
        """A program that only waits is not waited for long; others have time enough on a busy machine."""
        return SHORT if self.calls is S.TIMEOUT_WALL else LIMITS


def cheat(source: str, calls: S, asserts: S | None = None) -> Cheat:
    return Cheat(source, calls, asserts or calls)


WORD = (
    "import sys\ndef word():\n  f = sys._getframe()\n  while 'asked' not in f.f_locals: f = f.f_back\n"
    "  return f.f_locals['asked']['id']\n"
)
"""What the answer to the present call must carry: it stands in a frame of the harness."""

RAW_LINES = {
    "two answers": b'{"id": "%s", "ok": 3}\n{"id": "%s", "ok": 3}\n',
    "both an answer and an error": b'{"id": "%s", "ok": 3, "error": "E", "text": ""}\n',
    "an error that is no text": b'{"id": "%s", "error": ["ValueError"], "text": ""}\n',
    "a constant that is no JSON": b'{"id": "%s", "ok": NaN}\n',
    "an infinite number": b'{"id": "%s", "ok": 1e999999999}\n',
    "a number of many digits": b'{"id": "%s", "ok": ' + b"3" * 5000 + b"}\n",
    "a key twice": b'{"id": "%s", "ok": 3, "ok": 3}\n',
    "no UTF-8": b'{"id": "%s", "ok": "\xff\xfe"}\n',
    "an unknown tag": b'{"id": "%s", "ok": {"pickle": "cos"}}\n',
    "a tag of the wrong shape": b'{"id": "%s", "ok": {"d": [[1, 2, 3]]}}\n',
    "a list as a key": b'{"id": "%s", "ok": {"d": [[[1], 2]]}}\n',
    "a fraction of nothing": b'{"id": "%s", "ok": {"q": ["0x1", "0x0"]}}\n',
    "brackets": b'{"id": "%s", "ok": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
    "no JSON": b"3\n3\n",
    "nothing": b"\n",
}  # fmt: skip
"""Lines written to the answer channel in place of an answer."""

CHEATS: dict[str, Cheat] = {
    "sys_exit_at_top": cheat("import sys\nsys.exit(0)", S.EARLY_EXIT),
    "os_exit_at_top": cheat("import os\nos._exit(0)", S.EARLY_EXIT),
    "sys_exit_in_function": cheat("import sys\ndef add(a, b): sys.exit(0)", S.EARLY_EXIT),
    "os_exit_in_function": cheat("import os\ndef add(a, b): os._exit(0)", S.EARLY_EXIT),
    "printed_fake_results": cheat('print(\'PASSED\', 3)\nprint(\'{"passed": 3, "first": ""}\')\ndef add(a, b): print(3)', S.OK),
    "printed_fake_results_then_exit": cheat(
        "import os\ndef add(a, b):\n  print('3 passed', flush=True)\n  os._exit(0)", S.EARLY_EXIT
    ),
    "always_equal_object": cheat(
        "class E:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n  def __hash__(self): return 3\n"
        "def add(a, b): return E()", S.INVALID_RESULT, S.OK,
    ),
    "always_equal_object_that_says_it_is_an_int": cheat(
        "class E:\n  __class__ = int\n  def __eq__(self, o): return True\n  def __int__(self): return 99\n"
        "def add(a, b): return E()", S.OK,
    ),
    "int_subclass_with_patched_eq": cheat(
        "class I(int):\n  def __eq__(self, o): return True\n  def __hash__(self): return 3\ndef add(a, b): return I(99)", S.OK
    ),
    "str_subclass_with_patched_eq": cheat(
        "class T(str):\n  def __eq__(self, o): return True\n  def __hash__(self): return 3\n  def __str__(self): return '3'\n"
        "def add(a, b): return T('x')", S.OK,
    ),
    "dict_subclass_with_patched_eq": cheat(
        "class D(dict):\n  def __eq__(self, o): return True\n  def items(self): return 3\n  def __hash__(self): return 3\n"
        "def add(a, b): return D(x=1)", S.OK,
    ),
    "list_subclass_with_patched_eq": cheat(
        "class L(list):\n  def __eq__(self, o): return True\ndef add(a, b): return L([1])", S.OK
    ),
    "lying_repr": cheat(
        "class R:\n  def __repr__(self): return '3'\n  __str__ = __repr__\ndef add(a, b): return R()", S.INVALID_RESULT, S.OK
    ),
    "pickle_and_reduce": cheat(
        "import pickle\nclass P:\n  def __reduce__(self): return (eval, ('3',))\n"
        "def add(a, b): return P() if a == 1 else pickle.dumps(P())", S.INVALID_RESULT, S.OK,
    ),
    "code_to_be_evaluated": cheat("def add(a, b): return '__import__(\"os\")._exit(0) or 3'", S.OK),
    "patched_json_dumps": cheat(
        "import json\njson.dumps = lambda *a, **k: '3'\njson.loads = lambda *a, **k: {}\ndef add(a, b): return 0", S.OK
    ),
    "patched_json_encoder": cheat(
        "import json\njson.encoder.JSONEncoder.encode = lambda *a: '{\"ok\": 3}'\ndef add(a, b): return 0", S.INVALID_RESULT
    ),
    "patched_builtins": cheat(
        "import builtins\ndef add(a, b):\n  builtins.isinstance = lambda *a: True\n  builtins.int = lambda *a: 99\n  return 0",
        S.EARLY_EXIT,
    ),
    "patched_harness_through_frames": cheat(
        "import sys\ndef add(a, b):\n  f = sys._getframe().f_back\n  f.f_globals['encode'] = lambda *a: 3\n  return 0", S.OK
    ),
    "patched_harness_through_modules": cheat(
        "import sys\nfor m in [sys.modules['__main__'], *sys.modules.values()]:\n"
        "  for n in ('encode', 'decode', 'serve', 'equal'):\n    if hasattr(m, n) and m.__name__ != 'codecs':\n"
        "      setattr(m, n, lambda *a: 3)\n"
        "def add(a, b): return 0", S.OK,
    ),
    "traced_harness": cheat(
        "import sys\ndef trace(frame, event, arg):\n  if 'value' in frame.f_locals: frame.f_locals['value'] = 3\n"
        "  if 'passed' in frame.f_locals: frame.f_locals['passed'] = 3\n  return trace\nsys.settrace(trace)\n"
        "def add(a, b): return 0", S.OK,
    ),
    "frame_walk_for_expected_values": cheat(
        "import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n"
        "    for name, v in [*f.f_locals.items(), *f.f_globals.items()]:\n      if 'expected' in name: return v\n"
        "      if isinstance(v, dict) and 'expected' in v: return v['expected']\n"
        "      if isinstance(v, list): v.append('passed')\n    f = f.f_back\n  return 0", S.OK,
    ),
    "gc_search_for_tests": cheat(
        "import gc\ndef add(a, b):\n  for o in gc.get_objects():\n    if isinstance(o, (list, tuple, dict)):\n"
        "      if ' '.join(['assert', 'add(']) in str(o)[:5000]: return a + b\n  return 0", S.OK,
    ),
    "reads_test_files": cheat(
        "import os\ndef add(a, b):\n  for place, _, names in os.walk('/'):\n    for n in names:\n      try:\n"
        "        if n.startswith(('test_verdict', 'verdict_support', 'HumanEval', 'sanitized')): return a + b\n"
        "        if 'rollbook' in place: return a + b\n      except OSError: pass\n"
        "    if place.count('/') > 4: _.clear()\n  return 0", S.OK,
    ),
    "forged_answer_line": cheat(
        'import os\ndef add(a, b):\n  os.write(3, b\'{"id": 1, "ok": 3}\\n\')\n  return 0', S.INVALID_RESULT
    ),
    "forged_answer_line_with_the_right_word": cheat(
        WORD + 'import os\ndef add(a, b):\n  os.write(3, b\'{"id": "%s", "ok": 3}\\n\' % word().encode())\n  return 0',
        S.INVALID_RESULT,
    ),
    "forged_answers_in_advance": cheat(
        "import os\nos.write(3, b''.join(b'{\"id\": %d, \"ok\": %d}\\n' % (i, v) for i, v in enumerate([3, 4, 6])))\n"
        "def add(a, b): return 0", S.INVALID_RESULT,
    ),
    "forged_count": cheat(
        "import os\ndef add(a, b):\n  os.write(3, b'{\"passed\": 3, \"first\": \"\", \"raised\": false}\\n')\n  return 0",
        S.INVALID_RESULT,
    ),
    "closed_channel": cheat("import os\ndef add(a, b):\n  os.close(3)\n  return 3", S.RUNTIME_ERROR),
    "redirected_channel": cheat(
        "import os\nread, write = os.pipe()\nos.dup2(write, 3)\ndef add(a, b): return 3", S.TIMEOUT_WALL
    ),
    "line_without_end": cheat(
        "import os\ndef add(a, b):\n  while True: os.write(3, b'3' * 10_000)", S.OUTPUT_LIMIT
    ),
    "deep_list": cheat("def add(a, b):\n  x = []\n  for i in range(100_000): x = [x]\n  return x", S.INVALID_RESULT),
    "list_of_itself": cheat("def add(a, b):\n  x = []\n  x.append(x)\n  return x", S.INVALID_RESULT),
    "result_of_30_megabytes": cheat("def add(a, b): return 'x' * 30_000_000", S.OUTPUT_LIMIT),
    "huge_integer": cheat("def add(a, b): return 10 ** 100_000", S.INVALID_RESULT),
    "colliding_keys": cheat("def add(a, b): return {i * (2 ** 61 - 1) for i in range(1000)}", S.INVALID_RESULT),
    "generator": cheat("def add(a, b): yield a + b", S.INVALID_RESULT, S.OK),
    "endless_generator": cheat("def add(a, b):\n  while True: yield 3", S.INVALID_RESULT),
    "lazy_object": cheat(
        "class Z:\n  def __init__(self, *v): self.v = v\n  def __getattr__(self, n): return lambda *a: True\n"
        "def add(a, b): return Z(a, b)", S.INVALID_RESULT, S.OK,
    ),
    "endless_loop": cheat("def add(a, b):\n  while True: pass", S.TIMEOUT_CPU),
    "endless_loop_in_eq": cheat(
        "class E:\n  def __eq__(self, o):\n    while True: pass\ndef add(a, b): return E()", S.INVALID_RESULT, S.OK
    ),
    "endless_loop_in_bool": cheat(
        "class E:\n  def __bool__(self):\n    while True: pass\ndef add(a, b): return E()", S.TIMEOUT_CPU
    ),
    "signal_handlers_that_swallow_timeouts": cheat(
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, lambda *a: None)\n  except (OSError, ValueError): pass\n"
        "def add(a, b):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass", S.TIMEOUT_CPU,
    ),
    "sleeps_until_the_clock_ends": cheat("import time\ndef add(a, b): time.sleep(60)", S.TIMEOUT_WALL),
    "thread_that_answers_later": cheat(
        "import os, threading, time\ndef late():\n  time.sleep(0.1)\n  os.write(3, b'{\"id\": 2, \"ok\": 4}\\n')\n"
        "def add(a, b):\n  if a == 1: threading.Thread(target=late, daemon=True).start()\n  else: time.sleep(0.5)\n  return 0",
        S.INVALID_RESULT,
    ),
    "atexit_handlers": cheat(
        "import atexit, os, threading\natexit.register(lambda: os.write(3, b'{\"ok\": 3}\\n'))\n"
        "threading._register_atexit(lambda: os.write(3, b'{\"ok\": 3}\\n'))\ndef add(a, b): return 0", S.OK,
    ),
    "stack_overflow": cheat("def add(a, b): return add(a, b)", S.RUNTIME_ERROR),
    "stack_overflow_of_the_interpreter": cheat(
        "def add(a, b):\n  x = ()\n  for i in range(300_000): x = (x,)\n  return hash(x)",
        S.CRASHED,
    ),
    "kills_its_process_group": cheat("import os\ndef add(a, b): os.kill(0, 9)", S.CRASHED),
    "memory": cheat("def add(a, b): return len(bytearray(1 << 30))", S.OOM),
    "raises_what_tests_raise": cheat("def add(a, b): raise AssertionError", S.RUNTIME_ERROR),
    "always_true": cheat("def add(a, b): return True", S.OK),
    "reads_its_input_for_the_tests": cheat("tests = input()\ndef add(a, b): return 3", S.RUNTIME_ERROR),
    "lacks_the_function": cheat("def sub(a, b): return a - b", S.RUNTIME_ERROR),
    "does_not_compile": cheat("def add(a, b:\n  return 3", S.SYNTAX_ERROR),
}  # fmt: skip
