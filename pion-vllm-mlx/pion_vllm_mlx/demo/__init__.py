"""The main job, shown with real processes: `scripts/demo`, or `python -m pion_vllm_mlx.demo`."""
