{{/* "tls" or nothing: what the ports of gRPC speak. All take the root. */}}

{{/* How proxies read the port; the first is the name that Kubernetes gives HTTP/2 without TLS. */}}
{{- define "tandem.appProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" .Values.tls.enabled -}}
{{- end -}}
