//! Limits of a pod's traffic, at the node's end of its veth pair.
//!
//! ```text
//!  to the pod    node ─► tbf ─► vethXXXX ═══ eth0
//!  from the pod  eth0 ═══ vethXXXX ─► ingress: redirect ─► ifbXXXX ─► tbf ─► the node's rules
//! ```
//!
//! In: rates. Out: token bucket filters in the kernel. A filter queues packets, and drops them when the queue is
//! full. The filters end with their links.
//! A link's own filter is for packets that the node sends through it. Packets that come in get one by the detour
//! through an `ifb` device. The pod cannot change them: both are in the node's namespace.
//! Upstream: the CNI plugin `bandwidth`.

use futures::StreamExt;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rtnetlink::LinkIfb;
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};

use crate::error::{During, Error, tolerate};
use crate::links::Links;

const KIND: &str = "tbf";
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
const LINKLAYER_ETHERNET: u8 = 1;
/// Every protocol, in network byte order.
const ALL_PROTOCOLS: u16 = 3u16.to_be();
const INGRESS: u32 = 0xffff_0000;
/// A packet waits this long at most. Upstream: `latencyInMillis`.
const LATENCY_MS: u64 = 25;
/// The traffic of this time passes at once after a pause, at least `SMALLEST_BURST` bytes.
const BURST_MS: u64 = 50;
/// One large packet before segmentation.
const SMALLEST_BURST: u64 = 64 << 10;

/// In bits per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    pub to_pod: Option<u64>,
    pub from_pod: Option<u64>,
}

/// Limits the pod behind the node's link `veth`. `detour` is the name of its `ifb` device.
pub async fn limit(links: &Links, veth: &str, detour: &str, rates: Rates) -> Result<(), Error> {
    let veth = links.link(veth).await?;
    if let Some(rate) = rates.to_pod {
        add_filter(links, veth.index, rate).await?;
    }
    let Some(rate) = rates.from_pod else { return Ok(()) };
    let message = LinkIfb::new(detour).mtu(veth.mtu).build();
    tolerate(links.handle.link().add(message).execute().await, &[libc::EEXIST])
        .during(|| format!("create ifb {detour}"))
        .map_err(|error| error.names("ifb"))?;
    let ifb = links.link(detour).await?;
    add_filter(links, ifb.index, rate).await?;
    links.set_up(ifb.index).await?;
    let index = number(veth.index)?;
    let ingress = links.handle.qdisc().add(index).ingress().execute().await;
    tolerate(ingress, &[libc::EEXIST])
        .during(|| format!("add the ingress queue of {}", veth.name))
        .map_err(|error| error.names("sch_ingress"))?;
    let filter = links.handle.traffic_filter(index).add().parent(INGRESS).protocol(ALL_PROTOCOLS);
    let redirected = filter.redirect(ifb.index).during(|| "describe a redirection".into())?;
    redirected
        .execute()
        .await
        .during(|| format!("redirect what comes from {} to {detour}", veth.name))
        .map_err(|error| error.names("act_mirred"))
}

/// Removes the device of [`limit`]; a missing one is no error.
pub async fn remove(links: &Links, detour: &str) -> Result<(), Error> {
    links.remove(detour).await
}

async fn add_filter(links: &Links, index: u32, bits: u64) -> Result<(), Error> {
    let mut message = TcMessage::with_index(number(index)?);
    message.header.parent = TcHandle::ROOT;
    message.header.handle = TcHandle { major: 1, minor: 0 };
    message.attributes.push(TcAttribute::Kind(KIND.into()));
    message.attributes.push(TcAttribute::Options(options(bits)));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
    let mut handle = links.handle.clone();
    let answered = async {
        let mut answers = handle.request(request)?;
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload {
                return Err(rtnetlink::Error::NetlinkError(error));
            }
        }
        Ok(())
    };
    let done = answered.await.during(|| format!("limit the traffic of link {index}"));
    done.map_err(|error| error.names("sch_tbf"))
}

fn options(bits: u64) -> Vec<TcOption> {
    let rate = (bits / 8).max(1);
    let burst = (rate * BURST_MS / 1000).max(SMALLEST_BURST);
    let limit = rate * LATENCY_MS / 1000 + burst;
    let option = |kind, bytes: Vec<u8>| TcOption::Other(DefaultNla::new(kind, bytes));
    vec![
        option(TCA_TBF_PARMS, parameters(rate, limit)),
        option(TCA_TBF_RATE64, rate.to_ne_bytes().into()),
        option(TCA_TBF_BURST, saturated(burst).to_ne_bytes().into()),
    ]
}

/// `tc_tbf_qopt`: the rate, no peak rate, the queue's length in bytes. The attributes have the full rate and
/// the burst.
fn parameters(rate: u64, limit: u64) -> Vec<u8> {
    // `tc_ratespec`: cell_log, linklayer, overhead, cell_align, mpu, rate.
    let mut bytes = vec![0, LINKLAYER_ETHERNET, 0, 0, 0, 0, 0, 0];
    bytes.extend(saturated(rate).to_ne_bytes());
    bytes.extend([0; 12]);
    bytes.extend(saturated(limit).to_ne_bytes());
    // Buffer and mtu.
    bytes.extend([0; 8]);
    bytes
}

fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn number(index: u32) -> Result<i32, Error> {
    i32::try_from(index).map_err(|_| Error::Invalid(format!("no link has the index {index}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_kernels_layout() {
        let bytes = parameters(1_250_000, 96_786);
        assert_eq!(bytes.len(), 36);
        assert_eq!(bytes[8..12], 1_250_000u32.to_ne_bytes());
        assert_eq!(bytes[24..28], 96_786u32.to_ne_bytes());
        assert_eq!(parameters(u64::MAX, 1)[8..12], [0xff; 4]);
    }
}
