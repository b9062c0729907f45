import pytest, time, sys
sys.path.insert(0,'/work/main')
def test_x(same_each_time):
    import tests.storage.test_tier_deaths as T
    t=time.time(); f=T.deaths("always"); print(len(f), time.time()-t)
    from collections import Counter
    print(Counter(d.operation.kind for d in f))
    t=time.time()
    d=f[len(f)//2]; T.restart(d.disk,d.tier_disk,"always",d.now,"x"); print('restart',time.time()-t)
from tests.storage.fault_support import same_each_time, small
