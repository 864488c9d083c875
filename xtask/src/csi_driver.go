// The mock driver of Kubernetes' own end-to-end suite as a program: that suite runs it inside of its own
// process. Beside the driver's socket it serves what node-driver-registrar would: the registration.
// Each call is a line on standard output.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path"
	"syscall"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/driver"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/mock/service"
)

type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (r registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	fmt.Println("Registered", status.PluginRegistered, status.Error)
	return &registration.RegistrationStatusResponse{}, nil
}

func told(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, request)
	if err != nil {
		fmt.Println(path.Base(info.FullMethod), err)
	} else {
		fmt.Println(path.Base(info.FullMethod))
	}
	return answer, err
}

func listen(socket string) net.Listener {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return listener
}

func main() {
	name := flag.String("name", "mock.csi.decapod.test", "the driver's name")
	endpoint := flag.String("endpoint", "", "the driver's socket")
	registry := flag.String("registration", "", "the registrar's socket")
	flag.Parse()
	mock := service.New(service.Config{
		DriverName: *name, AttachLimit: 7, NodeExpansionRequired: true, PermissiveTargetPath: true,
	})
	servers := &driver.CSIDriverServers{Controller: mock, Identity: mock, Node: mock}
	if err := driver.NewCSIDriver(servers).Start(listen(*endpoint), told); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, registrar{name: *name, endpoint: *endpoint})
	go server.Serve(listen(*registry))
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	<-stop
	server.Stop()
}
