//! The columns of every kind's Table.
//!
//! In: a kind's type. Out: its columns as upstream's printers define them. What describes a field
//! says what the field's schema says, looked up when a Table is made; the rest has words of its own.
//! Cells are in each kind's strategy, or in [`crate::printers`].

use std::borrow::Cow;

use api::schema::describe;
use apiserver::resource::{CREATED_AT_COLUMN, Column, Doc, NAME_COLUMN};

/// The columns of a kind; name and creation time where the table does not know it.
pub(crate) fn of<T: k8s_openapi::Resource>() -> Vec<Column> {
    let row =
        COLUMNS.iter().find(|(version, kind, _)| (*version, *kind) == (T::API_VERSION, T::KIND));
    row.map_or_else(|| vec![NAME_COLUMN, CREATED_AT_COLUMN], |(.., columns)| columns())
}

fn text(name: &'static str, kind: &'static str, description: &'static str) -> Column {
    Column {
        name: Cow::Borrowed(name),
        kind: Cow::Borrowed(kind),
        format: Cow::Borrowed(""),
        description: Doc::Text(Cow::Borrowed(description)),
        priority: 0,
    }
}

fn doc(name: &'static str, kind: &'static str, field: &'static str) -> Column {
    Column { description: Doc::Field(describe, field), ..text(name, kind, "") }
}

fn age() -> Column {
    doc("Age", "string", "apimachinery.pkg.apis.meta.v1.ObjectMeta.creationTimestamp")
}

trait Marked {
    /// Only `-o wide` shows it.
    fn wide(self) -> Self;
    /// Clients take it for the object's name.
    fn named(self) -> Self;
}

impl Marked for Column {
    fn wide(mut self) -> Self {
        self.priority = 1;
        self
    }

    fn named(mut self) -> Self {
        self.format = Cow::Borrowed("name");
        self
    }
}

type Row = (&'static str, &'static str, fn() -> Vec<Column>);

const COLUMNS: &[Row] = &[
    ("certificates.k8s.io/v1beta1", "ClusterTrustBundle", || {
        vec![
            NAME_COLUMN,
            doc(
                "SignerName",
                "string",
                "api.certificates.v1beta1.ClusterTrustBundleSpec.signerName",
            ),
        ]
    }),
    ("certificates.k8s.io/v1beta1", "PodCertificateRequest", || {
        vec![
            NAME_COLUMN,
            doc("PodName", "string", "api.certificates.v1beta1.PodCertificateRequestSpec.podName"),
            doc(
                "ServiceAccountName",
                "string",
                "api.certificates.v1beta1.PodCertificateRequestSpec.serviceAccountName",
            ),
            doc(
                "NodeName",
                "string",
                "api.certificates.v1beta1.PodCertificateRequestSpec.nodeName",
            ),
            doc(
                "SignerName",
                "string",
                "api.certificates.v1beta1.PodCertificateRequestSpec.signerName",
            ),
            text("State", "string", "Is the request Pending, Issued, Denied, or Failed?"),
            doc(
                "UnverifiedUserAnnotations",
                "string",
                "api.certificates.v1beta1.PodCertificateRequestSpec.unverifiedUserAnnotations",
            ),
        ]
    }),
    ("coordination.k8s.io/v1beta1", "LeaseCandidate", || {
        vec![
            NAME_COLUMN,
            doc("LeaseName", "string", "api.coordination.v1beta1.LeaseCandidateSpec.leaseName"),
            text("BinaryVersion", "string", ""),
            text("EmulationVersion", "string", ""),
            age(),
        ]
    }),
    ("internal.apiserver.k8s.io/v1alpha1", "StorageVersion", || {
        vec![
            NAME_COLUMN,
            doc(
                "CommonEncodingVersion",
                "string",
                "api.apiserverinternal.v1alpha1.StorageVersionStatus.commonEncodingVersion",
            ),
            doc(
                "StorageVersions",
                "string",
                "api.apiserverinternal.v1alpha1.StorageVersionStatus.storageVersions",
            ),
            age(),
        ]
    }),
    ("resource.k8s.io/v1alpha3", "DeviceTaintRule", || {
        vec![
            NAME_COLUMN,
            doc("Key", "string", "api.resource.v1.DeviceTaint.key"),
            doc("Value", "string", "api.resource.v1.DeviceTaint.value"),
            doc("Effect", "string", "api.resource.v1.DeviceTaint.effect"),
            doc("TimeAdded", "string", "api.resource.v1.DeviceTaint.timeAdded"),
            age(),
        ]
    }),
    ("resource.k8s.io/v1alpha3", "ResourcePoolStatusRequest", || {
        vec![
            NAME_COLUMN,
            text("Driver", "string", "The driver to query pools for."),
            text("Total", "string", "Total number of devices across all pools."),
            text("Available", "string", "Number of available devices across all pools."),
            text("Allocated", "string", "Number of allocated devices across all pools."),
            text("Unavailable", "string", "Number of unavailable devices across all pools."),
            text("Errors", "string", "Number of pools with validation errors."),
            text("Pools", "integer", "Total number of matching pools."),
            text("Status", "string", "Processing status."),
            text("Completed", "string", "Time since the observation completed."),
        ]
    }),
    ("scheduling.k8s.io/v1alpha2", "PodGroup", || {
        vec![
            NAME_COLUMN,
            doc("Policy", "string", "api.scheduling.v1alpha2.PodGroupSpec.schedulingPolicy"),
            text("Workload", "string", "Name of the referenced Workload object"),
            text("Status", "string", "Status of the PodGroup"),
            age(),
        ]
    }),
    ("scheduling.k8s.io/v1alpha2", "Workload", || vec![NAME_COLUMN, age()]),
    ("apiregistration.k8s.io/v1", "APIService", || {
        vec![
            NAME_COLUMN,
            text("Service", "string", "The reference to the service that hosts this API endpoint."),
            text("Available", "string", "Whether this service is available."),
            age(),
        ]
    }),
    ("certificates.k8s.io/v1", "CertificateSigningRequest", || {
        vec![
            NAME_COLUMN,
            age(),
            text(
                "SignerName",
                "string",
                "Requested signer for the request. It is a qualified name in the form: `scope-hostname.io/name`. If empty, it will be defaulted:\n 1. If it's a kubelet client certificate, it is assigned\n    \"kubernetes.io/kube-apiserver-client-kubelet\".\n 2. If it's a kubelet serving certificate, it is assigned\n    \"kubernetes.io/kubelet-serving\".\n 3. Otherwise, it is assigned \"kubernetes.io/legacy-unknown\".\nDistribution of trust for signers happens out of band. You can select on this field using `spec.signerName`.",
            ),
            text("Requestor", "string", "Base64-encoded PKCS#10 CSR data"),
            doc(
                "RequestedDuration",
                "string",
                "api.certificates.v1.CertificateSigningRequestSpec.expirationSeconds",
            ),
            text(
                "Condition",
                "string",
                "Conditions applied to the request, such as approval or denial.",
            ),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "Role",
                "string",
                "RoleRef can only reference a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
            ),
            age(),
            text("Users", "string", "Users in the clusterRoleBinding").wide(),
            text("Groups", "string", "Groups in the clusterRoleBinding").wide(),
            text("ServiceAccounts", "string", "ServiceAccounts in the clusterRoleBinding").wide(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("v1", "ComponentStatus", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "Status of the component conditions"),
            text("Message", "string", "Message of the component conditions"),
            text("Error", "string", "Error of the component conditions"),
        ]
    }),
    ("v1", "ConfigMap", || {
        vec![NAME_COLUMN, doc("Data", "string", "api.core.v1.ConfigMap.data"), age()]
    }),
    ("apps/v1", "ControllerRevision", || {
        vec![
            NAME_COLUMN,
            text("Controller", "string", "Controller of the object"),
            doc("Revision", "string", "api.apps.v1.ControllerRevision.revision"),
            age(),
        ]
    }),
    ("batch/v1", "CronJob", || {
        vec![
            NAME_COLUMN,
            doc("Schedule", "string", "api.batch.v1.CronJobSpec.schedule"),
            doc("Timezone", "string", "api.batch.v1.CronJobSpec.timeZone"),
            doc("Suspend", "boolean", "api.batch.v1.CronJobSpec.suspend"),
            doc("Active", "integer", "api.batch.v1.CronJobStatus.active"),
            doc("Last Schedule", "string", "api.batch.v1.CronJobStatus.lastScheduleTime"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.batch.v1.JobSpec.selector").wide(),
        ]
    }),
    ("storage.k8s.io/v1", "CSIDriver", || {
        vec![
            NAME_COLUMN,
            doc("AttachRequired", "boolean", "api.storage.v1.CSIDriverSpec.attachRequired"),
            doc("PodInfoOnMount", "boolean", "api.storage.v1.CSIDriverSpec.podInfoOnMount"),
            doc("StorageCapacity", "boolean", "api.storage.v1.CSIDriverSpec.storageCapacity"),
            doc("TokenRequests", "string", "api.storage.v1.CSIDriverSpec.tokenRequests"),
            doc("RequiresRepublish", "boolean", "api.storage.v1.CSIDriverSpec.requiresRepublish"),
            doc("Modes", "string", "api.storage.v1.CSIDriverSpec.volumeLifecycleModes"),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "CSINode", || {
        vec![
            NAME_COLUMN,
            text(
                "Drivers",
                "integer",
                "Drivers indicates the number of CSI drivers registered on the node",
            ),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "CSIStorageCapacity", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("apps/v1", "DaemonSet", || {
        vec![
            NAME_COLUMN,
            doc("Desired", "integer", "api.apps.v1.DaemonSetStatus.desiredNumberScheduled"),
            doc("Current", "integer", "api.apps.v1.DaemonSetStatus.currentNumberScheduled"),
            doc("Ready", "integer", "api.apps.v1.DaemonSetStatus.numberReady"),
            doc("Up-to-date", "integer", "api.apps.v1.DaemonSetStatus.updatedNumberScheduled"),
            doc("Available", "integer", "api.apps.v1.DaemonSetStatus.numberAvailable"),
            doc("Node Selector", "string", "api.core.v1.PodSpec.nodeSelector"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.apps.v1.DaemonSetSpec.selector").wide(),
        ]
    }),
    ("apps/v1", "Deployment", || {
        vec![
            NAME_COLUMN,
            text("Ready", "string", "Number of the pod with ready state"),
            doc("Up-to-date", "string", "api.apps.v1.DeploymentStatus.updatedReplicas"),
            doc("Available", "string", "api.apps.v1.DeploymentStatus.availableReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.apps.v1.DeploymentSpec.selector").wide(),
        ]
    }),
    ("resource.k8s.io/v1", "DeviceClass", || vec![NAME_COLUMN, age()]),
    ("v1", "Endpoints", || {
        vec![NAME_COLUMN, doc("Endpoints", "string", "api.core.v1.Endpoints.subsets"), age()]
    }),
    ("discovery.k8s.io/v1", "EndpointSlice", || {
        vec![
            NAME_COLUMN,
            doc("AddressType", "string", "api.discovery.v1.EndpointSlice.addressType"),
            doc("Ports", "string", "api.discovery.v1.EndpointSlice.ports"),
            doc("Endpoints", "string", "api.discovery.v1.EndpointSlice.endpoints"),
            age(),
        ]
    }),
    ("v1", "Event", || {
        vec![
            doc("Last Seen", "string", "api.core.v1.Event.lastTimestamp"),
            doc("Type", "string", "api.core.v1.Event.type"),
            doc("Reason", "string", "api.core.v1.Event.reason"),
            doc("Object", "string", "api.core.v1.Event.involvedObject"),
            doc("Subobject", "string", "api.core.v1.ObjectReference.fieldPath").wide(),
            doc("Source", "string", "api.core.v1.Event.source").wide(),
            doc("Message", "string", "api.core.v1.Event.message"),
            doc("First Seen", "string", "api.core.v1.Event.firstTimestamp").wide(),
            doc("Count", "string", "api.core.v1.Event.count").wide(),
            doc("Name", "string", "apimachinery.pkg.apis.meta.v1.ObjectMeta.name").named().wide(),
        ]
    }),
    ("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", || {
        vec![
            NAME_COLUMN,
            doc(
                "PriorityLevel",
                "string",
                "api.flowcontrol.v1.PriorityLevelConfigurationReference.name",
            ),
            doc(
                "MatchingPrecedence",
                "string",
                "api.flowcontrol.v1.FlowSchemaSpec.matchingPrecedence",
            ),
            doc(
                "DistinguisherMethod",
                "string",
                "api.flowcontrol.v1.FlowSchemaSpec.distinguisherMethod",
            ),
            age(),
            text(
                "MissingPL",
                "string",
                "references a broken or non-existent PriorityLevelConfiguration",
            ),
        ]
    }),
    ("autoscaling/v2", "HorizontalPodAutoscaler", || {
        vec![
            NAME_COLUMN,
            doc(
                "Reference",
                "string",
                "api.autoscaling.v2.HorizontalPodAutoscalerSpec.scaleTargetRef",
            ),
            doc("Targets", "string", "api.autoscaling.v2.HorizontalPodAutoscalerSpec.metrics"),
            doc("MinPods", "string", "api.autoscaling.v2.HorizontalPodAutoscalerSpec.minReplicas"),
            doc("MaxPods", "string", "api.autoscaling.v2.HorizontalPodAutoscalerSpec.maxReplicas"),
            doc(
                "Replicas",
                "string",
                "api.autoscaling.v2.HorizontalPodAutoscalerStatus.currentReplicas",
            ),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "IngressClass", || {
        vec![
            NAME_COLUMN,
            text("Controller", "string", "Controller that is responsible for handling this class"),
            text("Parameters", "string", "A reference to a resource with additional parameters"),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "Ingress", || {
        vec![
            NAME_COLUMN,
            text(
                "Class",
                "string",
                "The name of the IngressClass resource that should be used for additional configuration",
            ),
            text(
                "Hosts",
                "string",
                "Hosts that incoming requests are matched against before the ingress rule",
            ),
            text(
                "Address",
                "string",
                "Address is a list containing ingress points for the load-balancer",
            ),
            text("Ports", "string", "Ports of TLS configurations that open"),
            age(),
        ]
    }),
    ("networking.k8s.io/v1", "IPAddress", || {
        vec![NAME_COLUMN, doc("ParentRef", "string", "api.networking.v1.IPAddressSpec.parentRef")]
    }),
    ("batch/v1", "Job", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "Status of the job."),
            doc("Completions", "string", "api.batch.v1.JobStatus.succeeded"),
            text("Duration", "string", "Time required to complete the job."),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.batch.v1.JobSpec.selector").wide(),
        ]
    }),
    ("coordination.k8s.io/v1", "Lease", || {
        vec![
            NAME_COLUMN,
            doc("Holder", "string", "api.coordination.v1.LeaseSpec.holderIdentity"),
            age(),
        ]
    }),
    ("v1", "LimitRange", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy", || {
        vec![
            NAME_COLUMN,
            text(
                "Mutations",
                "integer",
                "Mutation indicates the number of mutations rules defined in this configuration",
            ),
            text(
                "ParamKind",
                "string",
                "ParamKind specifies the kind of resources used to parameterize this policy",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "PolicyName",
                "string",
                "PolicyName indicates the policy definition which the policy binding binded to",
            ),
            text(
                "ParamRef",
                "string",
                "ParamRef indicates the param resource which sets the configuration param",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", || {
        vec![
            NAME_COLUMN,
            text(
                "Webhooks",
                "integer",
                "Webhooks indicates the number of webhooks registered in this configuration",
            ),
            age(),
        ]
    }),
    ("v1", "Namespace", || {
        vec![NAME_COLUMN, text("Status", "string", "The status of the namespace"), age()]
    }),
    ("networking.k8s.io/v1", "NetworkPolicy", || {
        vec![
            NAME_COLUMN,
            doc("Pod-Selector", "string", "api.networking.v1.NetworkPolicySpec.podSelector"),
            age(),
        ]
    }),
    ("v1", "Node", || {
        vec![
            NAME_COLUMN,
            text("Status", "string", "The status of the node"),
            text("Roles", "string", "The roles of the node"),
            age(),
            doc("Version", "string", "api.core.v1.NodeSystemInfo.kubeletVersion"),
            doc("Internal-IP", "string", "api.core.v1.NodeStatus.addresses").wide(),
            doc("External-IP", "string", "api.core.v1.NodeStatus.addresses").wide(),
            doc("OS-Image", "string", "api.core.v1.NodeSystemInfo.osImage").wide(),
            doc("Kernel-Version", "string", "api.core.v1.NodeSystemInfo.kernelVersion").wide(),
            doc(
                "Container-Runtime",
                "string",
                "api.core.v1.NodeSystemInfo.containerRuntimeVersion",
            )
            .wide(),
        ]
    }),
    ("v1", "PersistentVolumeClaim", || {
        vec![
            NAME_COLUMN,
            doc("Status", "string", "api.core.v1.PersistentVolumeClaimStatus.phase"),
            doc("Volume", "string", "api.core.v1.PersistentVolumeClaimSpec.volumeName"),
            doc("Capacity", "string", "api.core.v1.PersistentVolumeClaimStatus.capacity"),
            doc("Access Modes", "string", "api.core.v1.PersistentVolumeClaimStatus.accessModes"),
            text("StorageClass", "string", "StorageClass of the pvc"),
            text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pvc"),
            age(),
            doc("VolumeMode", "string", "api.core.v1.PersistentVolumeClaimSpec.volumeMode").wide(),
        ]
    }),
    ("v1", "PersistentVolume", || {
        vec![
            NAME_COLUMN,
            doc("Capacity", "string", "api.core.v1.PersistentVolumeSpec.capacity"),
            doc("Access Modes", "string", "api.core.v1.PersistentVolumeSpec.accessModes"),
            doc(
                "Reclaim Policy",
                "string",
                "api.core.v1.PersistentVolumeSpec.persistentVolumeReclaimPolicy",
            ),
            doc("Status", "string", "api.core.v1.PersistentVolumeStatus.phase"),
            doc("Claim", "string", "api.core.v1.PersistentVolumeSpec.claimRef"),
            text("StorageClass", "string", "StorageClass of the pv"),
            text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pv"),
            doc("Reason", "string", "api.core.v1.PersistentVolumeStatus.reason"),
            age(),
            doc("VolumeMode", "string", "api.core.v1.PersistentVolumeSpec.volumeMode").wide(),
        ]
    }),
    ("policy/v1", "PodDisruptionBudget", || {
        vec![
            NAME_COLUMN,
            text("Min Available", "string", "The minimum number of pods that must be available."),
            text(
                "Max Unavailable",
                "string",
                "The maximum number of pods that may be unavailable.",
            ),
            text(
                "Allowed Disruptions",
                "integer",
                "Calculated number of pods that may be disrupted at this time.",
            ),
            age(),
        ]
    }),
    ("v1", "Pod", || {
        vec![
            NAME_COLUMN,
            text(
                "Ready",
                "string",
                "The aggregate readiness state of this pod for accepting traffic.",
            ),
            text("Status", "string", "The aggregate status of the containers in this pod."),
            text(
                "Restarts",
                "string",
                "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.",
            ),
            age(),
            doc("IP", "string", "api.core.v1.PodStatus.podIP").wide(),
            doc("Node", "string", "api.core.v1.PodSpec.nodeName").wide(),
            doc("Nominated Node", "string", "api.core.v1.PodStatus.nominatedNodeName").wide(),
            doc("Readiness Gates", "string", "api.core.v1.PodSpec.readinessGates").wide(),
        ]
    }),
    ("v1", "PodTemplate", || {
        vec![
            NAME_COLUMN,
            text("Containers", "string", "Names of each container in the template."),
            text("Images", "string", "Images referenced by each container in the template."),
            text("Pod Labels", "string", "The labels for the pod template."),
        ]
    }),
    ("scheduling.k8s.io/v1", "PriorityClass", || {
        vec![
            NAME_COLUMN,
            doc("Value", "integer", "api.scheduling.v1.PriorityClass.value"),
            doc("Global-Default", "boolean", "api.scheduling.v1.PriorityClass.globalDefault"),
            age(),
            doc("PreemptionPolicy", "string", "api.scheduling.v1.PriorityClass.preemptionPolicy"),
        ]
    }),
    ("flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", || {
        vec![
            NAME_COLUMN,
            doc("Type", "string", "api.flowcontrol.v1.PriorityLevelConfigurationSpec.type"),
            doc(
                "NominalConcurrencyShares",
                "string",
                "api.flowcontrol.v1.LimitedPriorityLevelConfiguration.nominalConcurrencyShares",
            ),
            doc("Queues", "string", "api.flowcontrol.v1.QueuingConfiguration.queues"),
            doc("HandSize", "string", "api.flowcontrol.v1.QueuingConfiguration.handSize"),
            doc(
                "QueueLengthLimit",
                "string",
                "api.flowcontrol.v1.QueuingConfiguration.queueLengthLimit",
            ),
            age(),
        ]
    }),
    ("apps/v1", "ReplicaSet", || {
        vec![
            NAME_COLUMN,
            doc("Desired", "integer", "api.apps.v1.ReplicaSetSpec.replicas"),
            doc("Current", "integer", "api.apps.v1.ReplicaSetStatus.replicas"),
            doc("Ready", "integer", "api.apps.v1.ReplicaSetStatus.readyReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.apps.v1.ReplicaSetSpec.selector").wide(),
        ]
    }),
    ("v1", "ReplicationController", || {
        vec![
            NAME_COLUMN,
            doc("Desired", "integer", "api.core.v1.ReplicationControllerSpec.replicas"),
            doc("Current", "integer", "api.core.v1.ReplicationControllerStatus.replicas"),
            doc("Ready", "integer", "api.core.v1.ReplicationControllerStatus.readyReplicas"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
            doc("Selector", "string", "api.core.v1.ReplicationControllerSpec.selector").wide(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceClaim", || {
        vec![
            NAME_COLUMN,
            text(
                "State",
                "string",
                "A summary of the current state (allocated, pending, reserved, etc.).",
            ),
            age(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceClaimTemplate", || vec![NAME_COLUMN, age()]),
    ("v1", "ResourceQuota", || {
        vec![
            NAME_COLUMN,
            text(
                "Request",
                "string",
                "Request represents a minimum amount of cpu/memory that a container may consume.",
            ),
            text(
                "Limit",
                "string",
                "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node.",
            ),
            age(),
        ]
    }),
    ("resource.k8s.io/v1", "ResourceSlice", || {
        vec![
            NAME_COLUMN,
            doc("Node", "string", "api.resource.v1.ResourceSliceSpec.nodeName"),
            doc("Driver", "string", "api.resource.v1.ResourceSliceSpec.driver"),
            doc("Pool", "string", "api.resource.v1.ResourcePool.name"),
            age(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "RoleBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "Role",
                "string",
                "RoleRef can reference a Role in the current namespace or a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
            ),
            age(),
            text("Users", "string", "Users in the roleBinding").wide(),
            text("Groups", "string", "Groups in the roleBinding").wide(),
            text("ServiceAccounts", "string", "ServiceAccounts in the roleBinding").wide(),
        ]
    }),
    ("rbac.authorization.k8s.io/v1", "Role", || vec![NAME_COLUMN, CREATED_AT_COLUMN]),
    ("node.k8s.io/v1", "RuntimeClass", || vec![NAME_COLUMN, text("Handler", "string", ""), age()]),
    ("v1", "Secret", || {
        vec![
            NAME_COLUMN,
            doc("Type", "string", "api.core.v1.Secret.type"),
            doc("Data", "string", "api.core.v1.Secret.data"),
            age(),
        ]
    }),
    ("v1", "ServiceAccount", || vec![NAME_COLUMN, age()]),
    ("networking.k8s.io/v1", "ServiceCIDR", || {
        vec![NAME_COLUMN, doc("CIDRs", "string", "api.networking.v1.ServiceCIDRSpec.cidrs"), age()]
    }),
    ("v1", "Service", || {
        vec![
            NAME_COLUMN,
            doc("Type", "string", "api.core.v1.ServiceSpec.type"),
            doc("Cluster-IP", "string", "api.core.v1.ServiceSpec.clusterIP"),
            doc("External-IP", "string", "api.core.v1.ServiceSpec.externalIPs"),
            doc("Port(s)", "string", "api.core.v1.ServiceSpec.ports"),
            age(),
            doc("Selector", "string", "api.core.v1.ServiceSpec.selector").wide(),
        ]
    }),
    ("apps/v1", "StatefulSet", || {
        vec![
            NAME_COLUMN,
            text("Ready", "string", "Number of the pod with ready state"),
            age(),
            text("Containers", "string", "Names of each container in the template.").wide(),
            text("Images", "string", "Images referenced by each container in the template.").wide(),
        ]
    }),
    ("storagemigration.k8s.io/v1beta1", "StorageVersionMigration", || {
        vec![
            NAME_COLUMN,
            text("Resource", "string", "GroupResource to migrate"),
            text("Status", "string", "Status of the migration"),
        ]
    }),
    ("storage.k8s.io/v1", "StorageClass", || {
        vec![
            NAME_COLUMN,
            doc("Provisioner", "string", "api.storage.v1.StorageClass.provisioner"),
            doc("ReclaimPolicy", "string", "api.storage.v1.StorageClass.reclaimPolicy"),
            doc("VolumeBindingMode", "string", "api.storage.v1.StorageClass.volumeBindingMode"),
            doc(
                "AllowVolumeExpansion",
                "string",
                "api.storage.v1.StorageClass.allowVolumeExpansion",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", || {
        vec![
            NAME_COLUMN,
            text(
                "Validations",
                "integer",
                "Validations indicates the number of validation rules defined in this configuration",
            ),
            text(
                "ParamKind",
                "string",
                "ParamKind specifies the kind of resources used to parameterize this policy",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", || {
        vec![
            NAME_COLUMN,
            text(
                "PolicyName",
                "string",
                "PolicyName indicates the policy definition which the policy binding binded to",
            ),
            text(
                "ParamRef",
                "string",
                "ParamRef indicates the param resource which sets the configuration param",
            ),
            age(),
        ]
    }),
    ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", || {
        vec![
            NAME_COLUMN,
            text(
                "Webhooks",
                "integer",
                "Webhooks indicates the number of webhooks registered in this configuration",
            ),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "VolumeAttachment", || {
        vec![
            NAME_COLUMN,
            doc("Attacher", "string", "api.storage.v1.VolumeAttachmentSpec.attacher").named(),
            doc("PV", "string", "api.storage.v1.VolumeAttachmentSource.persistentVolumeName"),
            doc("Node", "string", "api.storage.v1.VolumeAttachmentSpec.nodeName"),
            doc("Attached", "boolean", "api.storage.v1.VolumeAttachmentStatus.attached"),
            age(),
        ]
    }),
    ("storage.k8s.io/v1", "VolumeAttributesClass", || {
        vec![
            NAME_COLUMN,
            doc("DriverName", "string", "api.storage.v1.VolumeAttributesClass.driverName"),
            age(),
        ]
    }),
];

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GOLDEN: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/spec/golden/tables.json");

    /// Upstream's own columns, where they lie beside the repository.
    #[test]
    fn columns_are_upstreams() {
        let Ok(text) = std::fs::read_to_string(GOLDEN) else {
            println!("skipped: no {GOLDEN}");
            return;
        };
        let golden: Value = serde_json::from_str(&text).expect("JSON");
        let mut checked = 0;
        // The server that was asked was not told to serve more.
        let table = crate::tests::by_default();
        for row in table.iter().filter(|row| row.storage.is_some()) {
            let name = if row.group.is_empty() {
                format!("{}.{}", row.plural, row.version)
            } else {
                format!("{}.{}.{}", row.plural, row.version, row.group)
            };
            let columns: Vec<Value> = row.strategy.columns().iter().map(shown).collect();
            assert_eq!(Value::from(columns), golden[&name], "{name}");
            checked += 1;
        }
        assert!(checked > 50);
    }

    #[test]
    fn columns_name_fields_that_have_a_description() {
        for (version, kind, columns) in COLUMNS {
            for column in columns() {
                if let Doc::Field(_, path) = column.description {
                    assert_ne!(column.description.text(), "", "{version} {kind}: {path}");
                }
            }
        }
    }

    fn shown(column: &Column) -> Value {
        serde_json::json!({
            "name": column.name, "type": column.kind, "format": column.format,
            "description": column.description.text(), "priority": column.priority,
        })
    }
}
