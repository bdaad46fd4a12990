import sys, time
from bench import averaging_node as n
from decod.driver.driver import NodeDriver
from decod.driver.compute import ComputeProcess
from decod.protocol.core import events as ev
T0=[0.0]
def log(*a): print(f"{1e3*(time.monotonic()-T0[0]):9.1f}", *a, file=sys.stderr)
post=NodeDriver.post
def p(self, event):
    if isinstance(event, n.Begin): T0[0]=time.monotonic(); log("BEGIN")
    elif isinstance(event, ev.JobFinished): log("jobdone", event.job_id, f"{1e3*event.duration_s:.1f} ms")
    elif isinstance(event, ev.Received): log("received", type(event.message).__name__, event.sender[:1])
    elif isinstance(event, ev.TensorSent): log("sent", event.to[:1], event.size_bytes, f"{1e3*event.duration_s:.1f} ms")
    else: log(type(event).__name__)
    post(self, event)
NodeDriver.post=p
sub=ComputeProcess.submit
def s(self, kind, fields=None, **kw):
    log("submit", kind); return sub(self, kind, fields, **kw)
ComputeProcess.submit=s
al=NodeDriver.allocate
def a(self, size): 
    log("allocate", size); return al(self,size)
NodeDriver.allocate=a

import os, asyncio
from decod.protocol.averaging.averager import Averager
from decod.protocol.core.effects import SendTensor
if os.environ.get("ROT"):
    for name in ("_gathered","_reduced"):
        def wrap(orig):
            def f(self,*a):
                eff=orig(self,*a)
                idx=[i for i,e in enumerate(eff) if isinstance(e,SendTensor)]
                sends=[eff[i] for i in idx]
                N=len(self._roster)
                sends.sort(key=lambda e:(self._roster.index(e.to)-self._index)%N)
                for i,e in zip(idx,sends): eff[i]=e
                return eff
            return f
        setattr(Averager,name,wrap(getattr(Averager,name)))
if os.environ.get("CONC"):
    from decod.net.transmission import Transmission
    push=Transmission.push
    sem=asyncio.Semaphore(int(os.environ["CONC"]))
    async def pp(self,link,item):
        async with sem:
            return await push(self,link,item)
    Transmission.push=pp
n.main()
