"""What is in the way on this machine, and what to do about it: findings, made from descriptions alone.

Nothing here loads a native library, so a processor that one would die on can be looked at.
"""

from edgeqwen.doctor.examination import Examination, examine
from edgeqwen.doctor.finding import Finding

__all__ = ["Examination", "Finding", "examine"]
