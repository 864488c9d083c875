//! Container events: one stream from the runtime, shared by all listeners of this process.
//!
//! Some runtimes send each event to one client only, so there must not be two streams. When the
//! stream breaks, all listeners' streams end. The next subscriber opens a new one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use cri::{ContainerEventResponse, Events, GetEventsRequest, Result};
use tokio::sync::{broadcast, oneshot};

use super::rpc::Rpc;

const EVENTS: usize = 1024;
/// A runtime without events refuses within this time; a runtime with events may stay silent for long.
const REFUSAL: Duration = Duration::from_secs(2);

#[derive(Clone, Default)]
pub(super) struct Hub(Arc<Mutex<Option<broadcast::Sender<ContainerEventResponse>>>>);

impl Hub {
    pub async fn subscribe(&self, rpc: &Rpc, tasks: &Tasks) -> Result<Events> {
        let (sender, events) = {
            let mut hub = self.0.lock().expect("no panic while held");
            if let Some(sender) = &*hub {
                return Ok(sender.subscribe());
            }
            let (sender, events) = broadcast::channel(EVENTS);
            *hub = Some(sender.clone());
            (sender, events)
        };
        let (refused, refusal) = oneshot::channel();
        let (hub, rpc) = (self.clone(), rpc.clone());
        tasks.spawn("runtime events", async move {
            let outcome = pump(&rpc, &sender).await;
            // Before the last sender is dropped: a new subscriber must not find this stream.
            hub.0.lock().expect("no panic while held").take();
            // Only the first moments have a waiter. Later the end of the stream is the message.
            let _ = refused.send(outcome);
        });
        match tokio::time::timeout(REFUSAL, refusal).await {
            Ok(Ok(Err(error))) => Err(error),
            _ => Ok(events),
        }
    }
}

async fn pump(rpc: &Rpc, sender: &broadcast::Sender<ContainerEventResponse>) -> Result<()> {
    let path = "/runtime.v1.RuntimeService/GetContainerEvents";
    let mut events = rpc.stream(path, GetEventsRequest {}).await?;
    while let Some(event) = events.message().await.map_err(|status| rpc.error(&status))? {
        // There may be no listeners now.
        let _ = sender.send(event);
    }
    Ok(())
}
