// Upstream's stub of a device plugin, which its own tests run inside of themselves, as a program: two
// devices of one resource, and a variable that names those that a container has. Each is the node's
// /dev/null under another name. SIGUSR1: one is ill, SIGUSR2: it is well again.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	plugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

func allocate(asked *api.AllocateRequest, _ map[string]*api.Device) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range asked.ContainerRequests {
		ids := strings.Join(container.DevicesIds, ",")
		fmt.Println("Allocate", ids)
		one := &api.ContainerAllocateResponse{Envs: map[string]string{"DONGLES": ids}}
		for _, id := range container.DevicesIds {
			device := &api.DeviceSpec{ContainerPath: "/dev/dongle-" + id, HostPath: "/dev/null", Permissions: "rw"}
			one.Devices = append(one.Devices, device)
		}
		answer.ContainerResponses = append(answer.ContainerResponses, one)
	}
	return answer, nil
}

// Arguments: the folder of sockets, with a slash at its end, and the resource.
func main() {
	ctx := context.Background()
	logger := klog.FromContext(ctx)
	folder, resource := os.Args[1], os.Args[2]
	well := []*api.Device{{ID: "a", Health: api.Healthy}, {ID: "b", Health: api.Healthy}}
	ill := []*api.Device{{ID: "a", Health: api.Unhealthy}, {ID: "b", Health: api.Healthy}}
	stub := plugin.NewDevicePluginStub(logger, well, folder+"dongle.sock", resource, false, false)
	stub.SetAllocFunc(allocate)
	if err := stub.Start(ctx); err != nil {
		panic(err)
	}
	if err := stub.Register(ctx, folder+"kubelet.sock", resource, folder); err != nil {
		panic(err)
	}
	// Registers again when the kubelet's socket is made anew.
	go stub.Watch(ctx, folder+"kubelet.sock", resource, folder)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	for told := range signals {
		if told == syscall.SIGUSR1 {
			stub.Update(ill)
		} else {
			stub.Update(well)
		}
	}
}
