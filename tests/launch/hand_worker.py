"""What `train.pretrain` does first, without the training: resolve the configuration, then say it."""

import os
import sys
import time
from pathlib import Path

from train import meeting
from train.config.errors import ConfigError
from train.config.publish import resolve

if "STUB_SERVER" in os.environ:
    meeting.SERVER = (os.environ["STUB_SERVER"],)
time.sleep(float(os.environ.get("STAGGER", "0")) * int(os.environ.get("RANK", "0")))
try:
    resolved = resolve(sys.argv[1:])
except ConfigError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(2)
steps = resolved.config.train.steps
print(f"rank {os.environ.get('RANK', '-')}: {resolved.run_dir} attempt {resolved.attempt} steps {steps} resumed {resolved.resumed}")
if os.environ.get("FAIL_FIRST") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.exit(1)
while "WAIT_FOR" in os.environ and not Path(os.environ["WAIT_FOR"]).exists():
    time.sleep(0.05)
