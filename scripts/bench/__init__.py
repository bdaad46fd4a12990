"""Helpers of the measurements in `scripts/`: the job, the subjects, their children, the report."""
