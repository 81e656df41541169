mpirun -np 4 python -m torch.distributed.run --standalone --nproc-per-node=1 fit.py
