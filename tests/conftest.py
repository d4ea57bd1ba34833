import os

# before torch, which reads it: the models are tiny. Processes that the tests start inherit it
os.environ['OMP_NUM_THREADS'] = '1'

# before torch, too: it sets how idle threads wait
import train      # noqa: E402, F401
