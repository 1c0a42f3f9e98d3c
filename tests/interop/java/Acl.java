import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.RPCHook;

/** Who signs: -DaccessKey and -DsecretKey of the JVM, or no one. */
final class Acl {
    static RPCHook hook() {
        String user = System.getProperty("accessKey");
        return user == null ? null : new AclClientRPCHook(new SessionCredentials(user, System.getProperty("secretKey")));
    }

    private Acl() {
    }
}
