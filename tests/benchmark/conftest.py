import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # made_up.py is shared by this folder's tests
