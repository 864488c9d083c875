// Upstream's Go clients, typed and dynamic, told to speak CBOR: what they write they read back, as they
// do in JSON. Argument: a kubeconfig. It ends with what was not as it should be, or says `done`.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	definitions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const namespace = "default"

var ctx = context.Background()

// Which types bodies had, of requests and of answers.
type noted struct {
	next http.RoundTripper
	lock *sync.Mutex
	seen map[string]bool
}

func (n noted) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := n.next.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	n.lock.Lock()
	defer n.lock.Unlock()
	if kind := request.Header.Get("Content-Type"); kind != "" {
		n.seen["> "+kind] = true
	}
	// What is no resource yet is told as a page.
	if response.StatusCode != http.StatusNotFound {
		n.seen["< "+response.Header.Get("Content-Type")] = true
	}
	return response, nil
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, words ...any) {
	fmt.Printf(format+"\n", words...)
	os.Exit(1)
}

func equal(what string, got, want any) {
	if !reflect.DeepEqual(got, want) {
		fail("%s: got %#v, want %#v", what, got, want)
	}
}

// Until the condition holds, half a minute at most: what a controller or a cache does takes a moment.
func until(what string, is func() bool) {
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			fail("not within 30 s: %s", what)
		}
	}
}

func main() {
	config := must(clientcmd.BuildConfigFromFlags("", os.Args[1]))
	plain := must(kubernetes.NewForConfig(rest.CopyConfig(config)))
	types, lock := map[string]bool{}, &sync.Mutex{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return noted{next, lock, types}
	})
	// Built-in kinds would be protobuf.
	inCBOR := rest.CopyConfig(config)
	inCBOR.ContentType, inCBOR.AcceptContentTypes = "application/cbor", "application/cbor"
	typed(must(kubernetes.NewForConfig(inCBOR)))
	untyped(must(dynamic.NewForConfig(config)), plain)
	custom(must(definitions.NewForConfig(inCBOR)), must(dynamic.NewForConfig(config)))
	all := []string{}
	for kind := range types {
		all = append(all, kind)
	}
	slices.Sort(all)
	equal("the types of all bodies", strings.Join(all, "; "), strings.Join([]string{
		"< application/cbor", "< application/cbor-seq",
		"> application/apply-patch+cbor", "> application/cbor", "> application/merge-patch+json",
	}, "; "))
	fmt.Println("done")
}

func typed(client *kubernetes.Clientset) {
	bytes := []byte{0, 1, 2, 0xff, 0xfe, '"'}
	secrets := client.CoreV1().Secrets(namespace)
	secret := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: "bytes"}, Data: map[string][]byte{"b": bytes, "none": {}}}
	equal("created", must(secrets.Create(ctx, secret, meta.CreateOptions{})).Data["b"], bytes)
	equal("got", must(secrets.Get(ctx, "bytes", meta.GetOptions{})).Data["b"], bytes)
	list := must(secrets.List(ctx, meta.ListOptions{FieldSelector: "metadata.name=bytes"}))
	equal("listed", len(list.Items), 1)
	equal("listed", list.Items[0].Data["b"], bytes)
	_, err := secrets.Create(ctx, secret, meta.CreateOptions{})
	equal("a second one is refused", errors.IsAlreadyExists(err), true)
	applied := applycore.Secret("bytes", namespace).WithData(map[string][]byte{"c": bytes})
	got := must(secrets.Apply(ctx, applied, meta.ApplyOptions{FieldManager: "m", Force: true}))
	equal("applied", got.Data, map[string][]byte{"b": bytes, "none": {}, "c": bytes})

	replicas, port := int32(0), intstr.FromString("web")
	labels := map[string]string{"app": "d"}
	probe := &core.Probe{ProbeHandler: core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Path: "/", Port: port}}}
	limits := core.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("1Gi")}
	container := core.Container{Name: "c", Image: "i", ReadinessProbe: probe, Resources: core.ResourceRequirements{Limits: limits}}
	deployment := &apps.Deployment{ObjectMeta: meta.ObjectMeta{Name: "d"}, Spec: apps.DeploymentSpec{
		Replicas: &replicas, Selector: &meta.LabelSelector{MatchLabels: labels},
		Template: core.PodTemplateSpec{ObjectMeta: meta.ObjectMeta{Labels: labels}, Spec: core.PodSpec{Containers: []core.Container{container}}},
	}}
	deployments := client.AppsV1().Deployments(namespace)
	made := must(deployments.Create(ctx, deployment, meta.CreateOptions{}))
	is := made.Spec.Template.Spec.Containers[0]
	equal("a port by name", is.ReadinessProbe.HTTPGet.Port, port)
	equal("an amount", is.Resources.Limits.Cpu().String(), "1500m")
	equal("a time", made.CreationTimestamp.IsZero(), false)
	deployment.Name, deployment.Spec.Selector.MatchLabels = "other", nil
	_, err = deployments.Create(ctx, deployment, meta.CreateOptions{})
	equal("an invalid one is refused", errors.IsInvalid(err), true)
	uid := types.UID("another")
	err = deployments.Delete(ctx, "d", meta.DeleteOptions{Preconditions: &meta.Preconditions{UID: &uid}})
	equal("another's deletion is refused", errors.IsConflict(err), true)
	check(deployments.Delete(ctx, "d", meta.DeleteOptions{}))
	check(secrets.Delete(ctx, "bytes", meta.DeleteOptions{}))
	scale := must(client.CoreV1().ReplicationControllers(namespace).List(ctx, meta.ListOptions{}))
	equal("an empty list", len(scale.Items), 0)
}

func untyped(client dynamic.Interface, plain *kubernetes.Clientset) {
	kind := schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	maps := client.Resource(kind).Namespace(namespace)
	start := must(maps.List(ctx, meta.ListOptions{})).GetResourceVersion()
	options := meta.ListOptions{ResourceVersion: start, AllowWatchBookmarks: true, FieldSelector: "metadata.name=m"}
	events := must(maps.Watch(ctx, options))
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "m"},
		"data": map[string]any{"text": "für \"alle\"\n", "empty": ""}, "binaryData": map[string]any{"b": "AP8="},
	}}
	made := must(maps.Create(ctx, object, meta.CreateOptions{}))
	same(plain, made)
	made.Object["data"] = map[string]any{"text": "other"}
	changed := must(maps.Update(ctx, made, meta.UpdateOptions{}))
	patched := must(maps.Patch(ctx, "m", types.MergePatchType, []byte(`{"data":{"more":"x"}}`), meta.PatchOptions{}))
	unstructured.RemoveNestedField(object.Object, "binaryData")
	object.Object["data"] = map[string]any{"mine": "1"}
	applied := must(maps.Apply(ctx, "m", object, meta.ApplyOptions{FieldManager: "m"}))
	same(plain, applied)
	wrong := object.DeepCopy()
	wrong.Object["data"] = map[string]any{"n": int64(7)}
	_, err := maps.Update(ctx, wrong, meta.UpdateOptions{})
	words := "cannot unmarshal positive integer into Go struct field v1.ConfigMap.data of type string"
	equal("a wrong type is told", errors.IsBadRequest(err) && strings.Contains(err.Error(), words), true)
	check(maps.Delete(ctx, "m", meta.DeleteOptions{}))
	for _, want := range []struct {
		kind   watch.EventType
		object *unstructured.Unstructured
	}{{watch.Added, nil}, {watch.Modified, changed}, {watch.Modified, patched}, {watch.Modified, applied}, {watch.Deleted, nil}} {
		event := next(events)
		equal("event", event.Type, want.kind)
		if want.object != nil {
			equal("event", event.Object, want.object)
		}
	}
	events.Stop()
}

// The next event that is about an object.
func next(events watch.Interface) watch.Event {
	limit := time.After(30 * time.Second)
	for {
		select {
		case event, isOpen := <-events.ResultChan():
			equal("the watch is open", isOpen, true)
			if event.Type != watch.Bookmark {
				return event
			}
		case <-limit:
			fail("no event within 30 s")
		}
	}
}

// Is it what a client of JSON sees?
func same(plain *kubernetes.Clientset, object *unstructured.Unstructured) {
	get := plain.CoreV1().RESTClient().Get().Namespace(namespace).Resource("configmaps").Name(object.GetName())
	other := map[string]any{}
	check(json.Unmarshal(must(get.SetHeader("Accept", "application/json").DoRaw(ctx)), &other))
	equal(object.GetName(), object.Object, other)
}

func custom(client *definitions.Clientset, objects dynamic.Interface) {
	keep, least := true, 0.5
	schemas := apiextensions.JSONSchemaProps{Type: "object", Properties: map[string]apiextensions.JSONSchemaProps{
		"spec": {Type: "object", XPreserveUnknownFields: &keep, Properties: map[string]apiextensions.JSONSchemaProps{
			"share": {Type: "number", Minimum: &least, Default: &apiextensions.JSON{Raw: []byte(`0.75`)}},
		}},
	}}
	definition := &apiextensions.CustomResourceDefinition{ObjectMeta: meta.ObjectMeta{Name: "widgets.decapod.test"}, Spec: apiextensions.CustomResourceDefinitionSpec{
		Group: "decapod.test", Scope: apiextensions.NamespaceScoped,
		Names:    apiextensions.CustomResourceDefinitionNames{Plural: "widgets", Kind: "Widget"},
		Versions: []apiextensions.CustomResourceDefinitionVersion{{Name: "v1", Served: true, Storage: true, Schema: &apiextensions.CustomResourceValidation{OpenAPIV3Schema: &schemas}}},
	}}
	all := client.ApiextensionsV1().CustomResourceDefinitions()
	made := must(all.Create(ctx, definition, meta.CreateOptions{}))
	share := made.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["share"]
	equal("a default", string(share.Default.Raw), "0.75")
	equal("a bound", *share.Minimum, 0.5)
	widgets := objects.Resource(schema.GroupVersionResource{Group: "decapod.test", Version: "v1", Resource: "widgets"}).Namespace(namespace)
	spec := map[string]any{"n": int64(-5), "big": int64(1 << 40), "f": 1.25, "whole": 2.0, "exact": 0.18078399346030394, "null": nil, "list": []any{int64(1), "a", true, map[string]any{}}}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "decapod.test/v1", "kind": "Widget", "metadata": map[string]any{"name": "w"}, "spec": spec,
	}}
	until("the kind is served", func() bool {
		_, err := widgets.List(ctx, meta.ListOptions{})
		return err == nil
	})
	must(widgets.Create(ctx, object, meta.CreateOptions{}))
	got := must(widgets.Get(ctx, "w", meta.GetOptions{})).Object["spec"].(map[string]any)
	spec["share"] = 0.75
	equal("a custom object", got, spec)
	equal("a list of them", must(widgets.List(ctx, meta.ListOptions{})).Items[0].Object["spec"], any(spec))
	check(all.Delete(ctx, "widgets.decapod.test", meta.DeleteOptions{}))
}
